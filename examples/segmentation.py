"""Segmentation: the digit of each pixel, or none. Ambiguous pixels at the edge of a stroke are ignored, so the number of
pixels in the loss differs between images. The metric is the mean intersection over union.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from samerun import Loss, Samples, Scores

GROUND, CLASSES, IGNORED = 10, 11, 255


class Segmentation:
    monitor = ("mean_iou", "max")

    def samples(self, split):
        digits = np.load(files("app.tasks.image_classification.data") / "digits.npz")
        chosen = {"train": slice(1000), "validation": slice(1000, 1400), "test": slice(1400, None)}[split]
        ink, digit = digits["images"][chosen], digits["labels"][chosen].astype(np.int64)
        pixels = np.where(ink >= 8, digit[:, None, None], np.where(ink <= 2, GROUND, IGNORED))  # of 16
        return Samples.of({"images": torch.tensor(ink[:, None] / 16).float(), "pixels": torch.tensor(pixels)})

    def model(self, metadata):
        return nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2), nn.GroupNorm(8, 32), nn.GELU(),
            nn.Conv2d(32, 64, 5, padding=2), nn.GroupNorm(8, 64), nn.GELU(),
            nn.Conv2d(64, CLASSES, 5, padding=2),
        )  # fmt: skip

    def count(self, batch):
        "Pixels that count in the loss: summed over all processes before a step, so that each pixel has the same weight."
        return (batch["pixels"] != IGNORED).sum()

    def loss(self, model, batch):
        logits = model(batch["images"])  # [B, CLASSES, 8, 8]
        total = F.cross_entropy(logits, batch["pixels"], ignore_index=IGNORED, reduction="sum")
        return Loss.of(total, self.count(batch))

    def metrics(self, model, batch, valid):
        truth, found = batch["pixels"], model(batch["images"]).argmax(1)
        counted = valid[:, None, None] & (truth != IGNORED)
        pairs = torch.bincount(truth[counted] * CLASSES + found[counted], minlength=CLASSES**2).view(CLASSES, CLASSES)
        both, either = pairs.diag(), pairs.sum(0) + pairs.sum(1) - pairs.diag()
        return Scores({"iou": (both.double(), either.double())})  # one of each class, added up over all batches

    def reduce_metrics(self, sums, rows):
        both, either = sums["iou"]
        return {"mean_iou": (both / either.clamp(min=1)).mean().item()}


task = Segmentation
