"""What a plan predicts, beside what real runs of the application took from torch's allocator.

Of one process, DDP and FSDP2: docs/big-models-measured.md has what is known of the others.
"""

from __future__ import annotations

import pytest

from benchmarks.planning import CASES, figure_of

_SHORT = ("resnet18 sgd", "gpt2 nadam blocks", "gpt2 ddp blocks", "resnet18 fsdp2")
_TINY = ("convnet", "convnet ddp")
"""Of 5 to 10 MiB, in which a copy that a kernel makes for itself counts."""
_TRACED = [case for case in CASES if case.strategy in ("single", "ddp", "fsdp2") and case.name not in _TINY]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in _SHORT], ids=lambda case: case.name)
def test_a_plan_is_within_5_percent_of_the_truth(case: object) -> None:
    assert abs(figure_of(case).error) <= 0.05  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("case", _TRACED, ids=lambda case: case.name)
def test_every_plan_is_within_5_percent_of_the_truth(case: object) -> None:
    assert abs(figure_of(case).error) <= 0.05  # type: ignore[arg-type]
