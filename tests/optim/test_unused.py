"""A trainable parameter without a gradient after the first backward passes is named, under every strategy, before the step."""

from __future__ import annotations

import pytest
from processes import SCRIPTS, run

from app.errors import TrainingError

CASES = [("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero1", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2), ("fsdp2", 2)]


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "processes"), CASES)
def test_a_parameter_that_is_not_used_is_named_and_a_frozen_one_is_not(preset: str, processes: int) -> None:
    """In steps of 2 or 4 passes. That all others are left alone is shown by every run of the other tests."""
    finished = run(preset, processes, str(SCRIPTS / "unused.py"))
    assert finished.returncode == TrainingError.exit_code, finished.output
    said = "2 trainable parameters have no gradient after the first step's backward passes: unused.weight, unused.bias. "
    assert f"TrainingError: {said}" in finished.output
    assert "frozen" not in finished.output
