"""Multi-label classification with missing labels: which digits are in an image of four? Some labels are unknown and have no
part in the loss. The metric is the mean average precision over all samples.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from samerun import Loss, Samples, Scores

CLASSES, MISSING = 10, -1


class Multilabel:
    monitor = ("map", "max")

    def samples(self, split):
        digits = np.load(files("app.tasks.image_classification.data") / "digits.npz")
        chooses = np.random.default_rng(["train", "validation", "test"].index(split))
        first, end = {"train": (0, 1000), "validation": (1000, 1400), "test": (1400, 1797)}[split]
        four = chooses.integers(first, end, (4 * (end - first), 4))
        rows = digits["images"][four].reshape(-1, 2, 2, 8, 8).transpose(0, 1, 3, 2, 4).reshape(-1, 1, 16, 16)
        labels = (digits["labels"][four][:, :, None] == np.arange(CLASSES)).any(axis=1).astype(np.float32)
        labels[chooses.random(labels.shape) < 0.3] = MISSING
        return Samples.of({"images": torch.from_numpy(rows / np.float32(16)), "labels": torch.from_numpy(labels)})

    def model(self, metadata):
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.GELU(), nn.AvgPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.GELU(), nn.Linear(128, CLASSES),
        )  # fmt: skip

    def count(self, batch):  # what the loss of a pass is the mean of: each process has another number of labels
        return (batch["labels"] != MISSING).sum()

    def loss(self, model, batch):
        labels = batch["labels"]
        losses = F.binary_cross_entropy_with_logits(model(batch["images"]), labels.clamp(min=0), reduction="none")
        return Loss.of((losses * (labels != MISSING)).sum(), self.count(batch))

    def metrics(self, model, batch, valid):
        return Scores({}, rows=torch.cat([model(batch["images"]), batch["labels"]], dim=1).double())

    def reduce_metrics(self, sums, rows):
        found = [average_precision(*rows[:, [k, CLASSES + k]].unbind(1)) for k in range(CLASSES)]
        return {"map": float(np.mean(found))}


def average_precision(scores, labels):
    ranked = labels[labels != MISSING][scores[labels != MISSING].argsort(descending=True)]
    precision = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1)
    return float((precision * ranked).sum() / ranked.sum())


task = Multilabel
