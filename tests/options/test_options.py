"""Options take what they are made for and say of everything else what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from app.options import above_zero, names, not_negative, numbers, positive, share, tolerance

TAKEN: dict[Callable[[str], Any], dict[str, Any]] = {
    names: {"all": ["all"], "a,b,,a": ["a", "b"]},
    numbers: {"4,2,4": [4, 2]},
    positive: {"1": 1},
    not_negative: {"0": 0},
    above_zero: {"0.5": 0.5},
    tolerance: {"0": 0.0, "1e-5": 1e-5},
    share: {"1": 1.0},
}
REFUSED: dict[Callable[[str], Any], list[str]] = {
    numbers: ["0", "1.5", "1,x", "1,,2", "0,1"],
    positive: ["0", "1.5"],
    not_negative: ["1.5"],
    above_zero: ["0"],
    tolerance: [],
    share: ["0", "1.1"],
}


def test_what_is_taken_and_what_is_refused() -> None:
    for kind, values in TAKEN.items():
        assert {text: kind(text) for text in values} == values
    for kind, texts in REFUSED.items():
        for text in [*texts, "", "x", "-1", "nan", "inf"]:
            with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}': expected .*(such as|or more)"):
                kind(text)
