"""One sample as a container stores it, and what writes a container of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """A picture's file and its label."""

    key: str
    """What the sample was called where it came from: an image folder's relative path without the extension, say."""
    encoded: bytes
    """The picture's file, stored as it is."""
    extension: str
    """Of the picture's file, without the dot, in lower case: jpg, png, ..."""
    label: int
    """In 0 .. number of classes - 1."""


Writer = Callable[[Path, str, Sequence[str], Iterable[Record]], None]
"""From folder, split, class names and records to a container in the folder, with the samples numbered as the records come.

Nothing is seen under the container's name before it is complete. Raises DataError if there is one for that split already, if
there are no records, or if a label is not that of a class.
"""
