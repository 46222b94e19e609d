"""Reads the line files of a run folder, in which each line is a JSON object. Broken lines are skipped and reported.

A kill cuts the last line, a loss of power may leave anything: half a block of zeros, bytes that are no text, a line of another
file. So each line is read alone, and a broken one is counted and reported, never raised: the others are still valid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import RunFolderError

MOST = 2**63 - 1
"""Upper limit of any count that a run writes; a larger number means that the file is damaged."""


def parsed(text: bytes | bytearray) -> Any:
    """Return the JSON value of a line or a file. Raises ValueError, with a short reason, for anything else."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None


def is_count(value: Any) -> bool:
    """Return True for a whole number that a run may have written."""
    return type(value) is int and 0 <= value <= MOST


def is_finite(value: Any) -> bool:
    """Return True for a finite number; a bool is not one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST and math.isfinite(value)


class Lines:
    """The lines of a file, and how many were left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_out: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """Yield each whole line: its number from 1, its bytes with their end, and its object.

        Raises RunFolderError if the file is missing or cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.isspace():
                        continue
                    try:
                        values = parsed(line)
                        why = "" if isinstance(values, dict) else f"it is {type(values).__name__}, not an object"
                    except ValueError as error:
                        why = str(error)
                    if why or not line.endswith(b"\n"):
                        self.leave_out(number, why if line.endswith(b"\n") else "it is cut")
                    else:
                        yield number, line, values
        except FileNotFoundError:
            raise RunFolderError(f"{self._path} is missing.") from None
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be read: {error.strerror or error}.") from error

    def leave_out(self, number: int, why: str) -> None:
        """Count a line that cannot be used; whoever reads the values may find more of them."""
        self._left_out.append(f"line {number}: {why}")

    @property
    def complaint(self) -> str | None:
        """A sentence on what was left out, when all were read; None if nothing was."""
        if not self._left_out:
            return None
        count, first = len(self._left_out), self._left_out[0]
        what = f"a line is damaged or truncated ({first})"
        if count > 1:
            what = f"{count} lines are damaged or truncated (the first is {first})"
        return f"{self._path}: {what}, and ignored."
