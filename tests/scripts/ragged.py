"""Steps over samples that weigh differently, from nothing to 200: the norms of their gradients, as JSON.

    accelerate launch ... tests/scripts/ragged.py OUT sgd|adamw known|counted MAX_MICRO_BATCH

`known`: the samples say beforehand what they count; `counted`: the task counts what it is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.building import Parts
from app.data.samples import Splits
from app.distributed.runtime import Runtime
from app.distributed.sample_dropout import PassDraws
from app.environment.launched import read
from app.feed import Feed, samples_of
from app.metrics.clock import Clock
from app.metrics.metrics import Losses
from app.optim import parameter_groups
from app.optim.schedule import Length
from app.optim.steps import Steps
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import OptimRecipe, Recipe, TrainRecipe
from app.task import Form, Loss, Task

LONGEST, SIZE, BATCH, STEPS = 200, 64, 16, 6


def counts_of(recipe: Recipe) -> np.ndarray:
    """1 to 200; none in the first half of step 1, which is one rank's share of two, and in the first quarter of step 2."""
    counts = np.random.default_rng(0).integers(1, LONGEST + 1, SIZE)
    counts[samples_of(recipe, SIZE, 1)[: BATCH // 2]] = 0
    counts[samples_of(recipe, SIZE, 2)[: BATCH // 4]] = 0
    return counts


class Sequences:
    """Sequences of vectors, and of what is to be made of each."""

    workers, facts, fingerprint = False, {}, "made up"

    def __init__(self, counts: np.ndarray) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SIZE, LONGEST, 4, generator=generator)
        self.targets = torch.randn(SIZE, LONGEST, generator=generator)
        self.counts = counts

    def __len__(self) -> int:
        return SIZE

    def fetch(self, indices: np.ndarray, _draw: Any) -> dict[str, torch.Tensor]:
        lengths = torch.from_numpy(self.counts[indices])
        return {"inputs": self.inputs[indices], "targets": self.targets[indices], "lengths": lengths}


class KnownSequences(Sequences):
    def count(self, indices: np.ndarray) -> np.ndarray:
        return self.counts[indices]


class Regression(Task):
    def loss(self, model: Any, batch: dict[str, Any]) -> Loss:
        valid = torch.arange(LONGEST) < batch["lengths"][:, None]
        errors = (model(batch["inputs"]).squeeze(-1) - batch["targets"]).square()
        return Loss.of((errors * valid).sum(), batch["lengths"].sum())


class CountingRegression(Regression):
    def count(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["lengths"].sum()


out, kind, mode, max_micro_batch = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
train = TrainRecipe(global_batch_size=BATCH, max_micro_batch=max_micro_batch, steps=STEPS)
recipe = Recipe(train=train, optim=OptimRecipe(name=kind, lr=0.01))
launched = read(os.environ)
runtime = Runtime(launched, BatchPlan.of(recipe, launched.world_size))
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
rule = parameter_groups.Rule.of(recipe.optim, module)
model, optimizer = runtime.prepare(module, parameter_groups.build_optimizer(recipe.optim, module))
steps = Steps(runtime.accelerator, model, optimizer, clip_norm=None)
samples = (KnownSequences if mode == "known" else Sequences)(counts_of(recipe))
task: Any = CountingRegression() if mode == "counted" else Regression()
losses, clock = Losses(runtime.device), Clock(runtime.device)
length, data, loaded = Length(SIZE // BATCH, STEPS), Splits(samples, None, None), LoadedRecipe(recipe, "ragged", {})
parts = Parts(runtime, loaded, task, data, Form(), module, length, rule, PassDraws(0), 0.0, [])
feed = Feed(parts, 0, see=lambda *_: None, lap=clock.lap, say=print)
norms, totals, means = [], [], []
with feed:
    for step in range(STEPS):
        for batch, weight in feed.passes(step):
            with steps.micro_batch():
                loss = task.loss(model, batch)
                steps.backward(loss.mean, weight)
            losses.add(loss)
        taken = steps.take(0.01)
        losses.end_step(taken.skipped)
        loss_sum, counted = runtime.accelerator.reduce(losses.take(), "sum").tolist()
        norms.append(float(taken.grad_norm))
        totals.append((counted, float(feed.total)))
        means.append(loss_sum / counted)
if runtime.is_main:
    out.write_text(json.dumps({"norms": norms, "totals": totals, "means": means}))
runtime.close(model, optimizer)
