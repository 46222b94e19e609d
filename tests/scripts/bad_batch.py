"""app.train, in which the loss of one forward pass of the rank BAD_RANK is not a number, as after an overflow."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch

from app.train import main

BAD_STEP = 3
exact, calls = torch.nn.functional.cross_entropy, itertools.count(1)


def cross_entropy(*arguments: Any, **options: Any) -> torch.Tensor:
    found = exact(*arguments, **options)
    return found if found.is_meta else found * (float("nan") if next(calls) == BAD_STEP else 1.0)


if os.environ.get("RANK", "0") == os.environ["BAD_RANK"]:
    torch.nn.functional.cross_entropy = cross_entropy
main(sys.argv[1:])
