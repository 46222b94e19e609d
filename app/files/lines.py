"""Reads the line files of a run folder, in which each line is a JSON object. Broken lines are skipped and reported.

A kill cuts the last line, a loss of power may leave anything: half a block of zeros, bytes that are no text, a line of another
file. So a line is read alone, and what is none is counted and said, never raised: what the others say is still true.
Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.files import paths

MOST = 2**63 - 1
"""Upper limit of any count that a run writes; a larger number means that the file is damaged."""


def parsed(text: bytes | bytearray) -> Any:
    """Return the JSON value of a line or a file. Raises ValueError, with a short reason, for what is none."""
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number that a run may have written."""
    return type(value) is int and 0 <= value <= MOST


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; true, which is 1 in Python, is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST and math.isfinite(value)


class Lines:
    """The lines of a file, and what had to be left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left_out = 0
        self._first: tuple[int, str] | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
        """Yield each whole line: its number from 1, its bytes with their end, and its object.

        Raises RunFolderError if the file is missing or cannot be read.
        """
        try:
            with paths.open_regular(self._path) as file:
                for number, line in enumerate(file, start=1):
                    if line.isspace():
                        continue
                    values = self._object(line, number)
                    if values is not None:
                        yield number, line, values
        except FileNotFoundError:
            raise RunFolderError(f"{self._path} is missing.") from None
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be read: {error.strerror or error}.") from error

    def _object(self, line: bytes, number: int) -> dict[str, Any] | None:
        try:
            values = parsed(line)
        except ValueError as error:
            self.leave_out(number, "it is cut" if not line.endswith(b"\n") else str(error))
            return None
        if not line.endswith(b"\n"):
            self.leave_out(number, "it is cut")
            return None
        if not isinstance(values, dict):
            self.leave_out(number, f"it is {type(values).__name__}, not an object")
            return None
        return values

    def leave_out(self, number: int, why: str) -> None:
        """Count a line that cannot be used; whoever reads the values may find more of them."""
        self._left_out += 1
        self._first = self._first or (number, why)

    @property
    def complaint(self) -> str | None:
        """A sentence on what was left out, when all were read; None if nothing was."""
        if self._first is None:
            return None
        number, why = self._first
        if self._left_out == 1:
            return f"{self._path}: a line is damaged or truncated (line {number}: {why}), and is ignored."
        return (
            f"{self._path}: {self._left_out} lines are damaged or truncated (the first is line {number}: {why}), "
            "and are ignored."
        )
