"""A table: classify network connections as attacks or not. Reads the two files of NSL-KDD, https://www.unb.ca/cic/datasets/nsl.html.
Three of its 41 columns hold words: each word of the training file becomes a feature, about 113 features in all."""

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from samerun import Loss, Samples

WORDS = (1, 2, 3)  # protocol, service and flag
NUMBERS = [column for column in range(41) if column not in WORDS]  # column 41 is the kind of connection


@dataclass(frozen=True)
class Data:
    places = ("path",)
    path: str = "NSL-KDD"
    "Folder with KDDTrain+.txt and KDDTest+.txt."


@dataclass(frozen=True)
class Sections:
    data: Data = Data()


class Table:
    monitor = ("accuracy", "max")

    def __init__(self, sections):
        self.folder = Path(sections.data.path)

    def samples(self, split):
        if split == "validation":
            return None  # no file: `train.validation_fraction` holds out some of the training samples
        train, test = (list(csv.reader((self.folder / f"KDD{name}+.txt").open())) for name in ("Train", "Test"))
        words = [(column, word) for column in WORDS for word in sorted({row[column] for row in train})]
        rows = train if split == "train" else test
        numbers = torch.tensor([[float(row[column]) for column in NUMBERS] for row in rows])
        flags = torch.tensor([[float(row[column] == word) for column, word in words] for row in rows])
        inputs = torch.cat([numbers.log1p(), flags], dim=1)
        attack = torch.tensor([float(row[41] != "normal") for row in rows])
        return Samples.of({"inputs": inputs, "attack": attack}, facts={"features": inputs.shape[1]})

    def model(self, metadata):
        widths = [metadata["features"], 128, 64, 32, 16]
        hidden = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(16, 1), nn.Flatten(0))

    def loss(self, model, batch):
        logits, attack = model(batch["inputs"]), batch["attack"]
        right = ((logits > 0) == (attack > 0)).sum()
        return Loss(binary_cross_entropy_with_logits(logits, attack), len(attack), {"accuracy": (right, len(attack))})


task = Table
