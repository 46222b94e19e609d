"""`python -m benchmarks.language` for real: every program trains, one round of one step."""

from __future__ import annotations

import re
import sys

import pytest
from processes import Started

pytestmark = [pytest.mark.multiproc, pytest.mark.long]


def test_the_programs_take_turns() -> None:
    command = [sys.executable, "-m", "benchmarks.language", "--rounds", "1", "--steps", "1", "--batch", "2", "--length", "16"]
    output = Started(command).wait().check().output
    for program in ("hand-written, fused", "hand-written", "samerun", "transformers"):
        (times,) = re.findall(rf"^│ {re.escape(program)} +│ +([\d,]+) \(", output, flags=re.MULTILINE)
        assert int(times.replace(",", "")) > 100, output
