"""Regression: the elevation of a place from its coordinates. The elevations, measured at the Jacksboro fault in Tennessee, come
with matplotlib. The metric is the root mean squared error, in meters, at held-out points.
"""

import math

import numpy as np
import torch
from matplotlib.cbook import get_sample_data
from torch import nn
from torch.nn import functional as F

from samerun import Loss, Samples, Scores

OCTAVES = 6  # waves in which the model sees a place: each is half as long as the one before


class Land(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = mean, std
        layers = [nn.Linear(4 * OCTAVES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, places):  # [B, 2] in 0..1
        waves = torch.cat([places * math.pi * 2**octave for octave in range(OCTAVES)], dim=1)
        return self.mean + self.std * self.layers(torch.cat([waves.sin(), waves.cos()], dim=1)).squeeze(1)


class Heights:
    monitor = ("rmse", "min")

    def samples(self, split):
        heights = get_sample_data("jacksboro_fault_dem.npz")["elevation"][::2, ::2].astype(np.float32)
        places = np.stack(np.indices(heights.shape), axis=-1) / np.array(heights.shape)
        fifth = np.arange(heights.size).reshape(heights.shape) % 5
        chosen = {"train": fifth < 3, "validation": fifth == 3, "test": fifth == 4}[split]
        facts = {"mean": float(heights[fifth < 3].mean()), "std": float(heights[fifth < 3].std())}
        fields = {"places": torch.tensor(places[chosen], dtype=torch.float32), "heights": torch.tensor(heights[chosen])}
        return Samples.of(fields, facts=facts)

    def model(self, metadata):
        return Land(metadata["mean"], metadata["std"])

    def loss(self, model, batch):
        return Loss(F.mse_loss(model(batch["places"]), batch["heights"]))

    def metrics(self, model, batch, valid):
        errors = (model(batch["places"]) - batch["heights"]).double()
        return Scores.of({"squared_error": errors.square()}, valid)

    def reduce_metrics(self, sums, rows):
        total, count = sums["squared_error"]
        return {"rmse": math.sqrt(total / count)}


task = Heights
