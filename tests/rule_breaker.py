"""An own task that keeps the rules, or breaks the one that its recipe names."""

from __future__ import annotations

TASK = '''
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from app.task import Loss


@dataclass(frozen=True)
class Rule:
    broken: str = "nothing"


@dataclass(frozen=True)
class Sections:
    rule: Rule = Rule()


class Rows:
    """A table of 64 rows, some of which count nothing."""

    workers, facts, fingerprint = False, {}, "made up"

    def __init__(self, broken):
        self.broken = broken
        self.inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 64

    def fetch(self, indices, draw):
        inputs, noise = self.inputs[indices], torch.zeros(len(indices))
        if draw is not None:
            noise = torch.from_numpy(draw.uniform("noise"))
        if self.broken == "missing values":
            inputs = torch.where(inputs > 0, inputs, torch.nan)
        if self.broken == "rank":
            noise = noise + int(os.environ.get("RANK", "0"))
        return {"x": inputs + 0.1 * noise[:, None], "lengths": torch.from_numpy(indices % 4)}

    def count(self, indices):
        return indices % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(4, 8), nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.drop_rate = 0.1
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x, broken):
        h = self.body(x)
        if broken == "a buffer updated in forward":
            self.center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.center
        if broken == "functional dropout":
            h = nn.functional.dropout(h, self.drop_rate)
        if broken != "unused parameter":
            h = h + self.extra(x)
        return self.last(torch.tanh(h)).squeeze(-1)


class Criterion:
    """Not a module, so that the task does not show its weights."""

    def __init__(self):
        self.scale = nn.Parameter(torch.ones(3))


class Table:
    def __init__(self, sections):
        self.broken = sections.rule.broken
        self.temperatures = {"one": [nn.Linear(1, 1)]} if self.broken == "weights of a criterion" else {}
        self.criterion = Criterion()

    def samples(self, split):
        return Rows(self.broken) if split != "validation" else None

    def model(self, metadata):
        self.net = Net()
        return self.net

    def preprocess(self, batch, rng, *_):
        if self.broken == "random in ready":
            return {**batch, "x": batch["x"] + torch.rand(())}
        return batch

    def loss(self, model, batch):
        weights = batch["lengths"].to(batch["x"].dtype)
        found = model(batch["x"], self.broken)
        if self.broken == "a part past the model":
            found = found + self.net.last(self.net.body(batch["x"])).squeeze(-1)
        losses = (found - batch["x"].sum(1)).square()
        if self.broken == "a mean of means":
            return Loss(losses.mean(), batch["lengths"].sum())
        if self.broken == "a loss over the batch":
            losses = losses + (found - found.mean()).square() * len(found)
        if self.broken == "a sum given as mean":
            return Loss((losses * weights).sum(), batch["lengths"].sum())
        if self.broken == "random numbers of its own":
            losses = losses + np.random.default_rng().random()
        if self.broken == "weights of a criterion":
            losses = losses * self.temperatures["one"][0](torch.ones(1, 1)).square()
        if self.broken == "weights out of sight":
            losses = losses * self.criterion.scale.square().sum()
        if self.broken == "another count":
            return Loss.of((losses * weights).sum(), 2 * batch["lengths"].sum())
        if self.broken == "another count of one sample":
            return Loss.of((losses * weights).sum(), batch["lengths"].sum() + (batch["samples"] % 64 == 5).sum())
        return Loss.of((losses * weights).sum(), batch["lengths"].sum())


task = Table
'''
