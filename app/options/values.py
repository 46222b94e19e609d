"""Types of option values for `add_argument`. Their errors name the value and an example."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress


def names(text: str) -> list[str]:
    """Return the words of an option with commas between them, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def numbers(text: str) -> list[int]:
    """Return the whole numbers, 1 or more, of an option with commas between them, each once."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, separated by commas, such as 1,2,4")
    return list(dict.fromkeys(map(int, parts)))


def positive(text: str) -> int:
    """Return the whole number of an option, which is 1 or more."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def not_negative(text: str) -> int:
    """Return the whole number of an option, which is 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def above_zero(text: str) -> float:
    """Return the number of an option, which is more than 0."""
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, more than 0, such as 2.5")
    return value


def tolerance(text: str) -> float:
    """Return the largest difference that an option allows, which is 0 or more."""
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 0 or more, such as 1e-5")
    return value


def share(text: str) -> float:
    """Return the share of an option, more than 0 and at most 1."""
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, more than 0 and at most 1, such as 0.8")
    return value


def _number(text: str) -> float:
    """Return the number, or nan, which is in no range."""
    with suppress(ValueError):
        return float(text)
    return math.nan
