"""app.train, in which the loss of one forward pass, BAD_PASS, of the rank BAD_RANK is multiplied with BAD_FACTOR."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch

from app.train import main

exact, calls = torch.nn.functional.cross_entropy, itertools.count(1)
bad_pass = int(os.environ["BAD_PASS"])


def cross_entropy(*arguments: Any, **options: Any) -> torch.Tensor:
    found = exact(*arguments, **options)
    return found if found.is_meta else found * (float(os.environ["BAD_FACTOR"]) if next(calls) == bad_pass else 1.0)


if os.environ.get("RANK", "0") == os.environ["BAD_RANK"]:
    torch.nn.functional.cross_entropy = cross_entropy
main(sys.argv[1:])
