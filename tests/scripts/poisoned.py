"""app.train, in which one picture of the run, by its sample number, is a hundred million times as bright as it should be."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from app.tasks.image_classification.data.augment import Preparation
from app.train import main

exact, number = Preparation.train, int(os.environ["POISONED_SAMPLE"])


def train(self: Preparation, batch: Any, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = exact(self, batch, draws)
    return torch.where((batch["samples"] == number).view(-1, 1, 1, 1), 1e8 * inputs, inputs), targets


Preparation.train = train  # type: ignore[method-assign]
main(sys.argv[1:])
