"""Options take what they are made for and say of everything else what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from app.options.values import above_zero, names, numbers, positive, share, tolerance


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (names, "all", ["all"]),
        (names, "a,b,,a", ["a", "b"]),
        (numbers, "4,2,4", [4, 2]),
        (positive, "1", 1),
        (above_zero, "0.5", 0.5),
        (tolerance, "0", 0.0),
        (tolerance, "1e-5", 1e-5),
        (share, "1", 1.0),
    ],
)
def test_what_is_taken(kind: Callable[[str], Any], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf"])
@pytest.mark.parametrize("kind", [numbers, positive, above_zero, tolerance, share])
def test_what_is_refused(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}': expected .*(such as|or more)"):
        kind(text)


@pytest.mark.parametrize("kind", [numbers, positive, above_zero, share])
def test_zero_is_refused(kind: Callable[[str], Any]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'0': expected"):
        kind("0")


@pytest.mark.parametrize("text", ["1.5", "1,x", "1,,2", "0,1"])
def test_numbers_are_whole_and_from_1(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected numbers of at least 1"):
        numbers(text)
