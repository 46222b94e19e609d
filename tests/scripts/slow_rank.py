"""app.train, with one rank slow in the forward passes of training: `slow_rank.py RANK SECONDS ARGUMENTS OF app.train`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work, _functional_collectives

from app.train import main

exact = torch.nn.functional.cross_entropy


def cross_entropy(*arguments: Any, **options: Any) -> torch.Tensor:
    time.sleep(float(sys.argv[2]) * torch.is_grad_enabled())
    return exact(*arguments, **options)


if os.environ["RANK"] == sys.argv[1]:
    torch.nn.functional.cross_entropy = cross_entropy
owners = (Work, ProcessGroup, _functional_collectives)
before = [dict(vars(owner)) for owner in owners]
main(sys.argv[3:])
assert [dict(vars(owner)) for owner in owners] == before, "what was measured has replaced a method for good"
