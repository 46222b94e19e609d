"""Where each record of a set of files is: found once, in one pass over the files, and kept.

The index is an array int64 [N, 4] in a file beside the data, or in the user's cache where that folder cannot be written. Its
name holds a hash of the files' names, sizes and dates: when a file changes, another index is made. It is mapped into memory,
so that millions of records cost a process nothing, and all processes of a node share it.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from app.data.preprocessing import alone, cache_folder, progress
from app.errors import DataError
from app.files import other_libraries
from app.files.atomic_files import file_made_whole

_TOLD_EVERY = 256
"""Records between two updates of the progress line: an update takes about as long as looking up a record."""
FORMAT = 1
"""Version of this layout, part of the file name: an index with another layout is ignored."""
Row = tuple[int, int, int]
"""For each record: offset of its content in the file, size (both in bytes), label."""


@dataclass(frozen=True, eq=False)
class Index:
    """Where the records are; pickled, it is the index file's place, not its content."""

    path: Path

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [N, 4]: number of the file, offset in bytes, size in bytes, label."""
        return np.asarray(other_libraries.array(self.path))

    @property
    def labels(self) -> np.ndarray:
        """int64 [N]."""
        labels: np.ndarray = self.rows[:, 3]
        return labels

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}


def indexed(files: Sequence[Path], kind: str, read: Callable[[Path], Iterable[Row]]) -> Index:
    """Return the index of the records of files, in their order; it is kept beside the first.

    `read` yields the records of a file, unless there is an index already. `kind` is all that decides, beside the files, what it
    gives. Raises DataError if there are no records or the index can be kept nowhere, and what `read` raises.
    """
    name = _name(files, kind)
    folder = files[0].parent
    places, problems, no_cache = [folder], [], []
    if not os.access(folder / name, os.R_OK):
        try:
            places.append(cache_folder("indexes") / _digest(str(folder.resolve())))
        except OSError as error:
            no_cache.append(f"{error.filename} ({error.strerror})")
    for place in places:
        if os.access(place / name, os.R_OK):
            return Index(place / name)
    for place in places:
        try:
            with alone(place / ".samerun.lock"):
                if not (place / name).exists():
                    _write(place, name, _table(files, read))
        except OSError as error:
            problems.append(f"{place} ({error.strerror or error})")
        else:
            return Index(place / name)
    raise DataError(
        f"the index of {folder} cannot be written to {' nor in '.join(problems + no_cache)}; free space "
        "there, or set SAMERUN_CACHE to a writable folder"
    )


def _table(files: Sequence[Path], read: Callable[[Path], Iterable[Row]]) -> np.ndarray:
    # 32 bytes a record; tuples in a list would take 200.
    numbers = array("q")
    total_bytes = sum(file.stat().st_size for file in files)
    with progress(f"indexing the samples of {files[0].parent}", total_bytes, "bytes") as advance:
        for number, file in enumerate(files):
            seen_bytes = 0
            for count, row in enumerate(read(file)):
                numbers.extend((number, *row))
                if count % _TOLD_EVERY == 0:
                    advance(row[0] - seen_bytes)
                    seen_bytes = row[0]
            advance(file.stat().st_size - seen_bytes)
    if not numbers:
        raise DataError(f"{', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''}: no samples found")
    return np.frombuffer(numbers, np.int64).reshape(-1, 4)


def _write(place: Path, name: str, table: np.ndarray) -> None:
    """Write the index under its name, whole, and remove those of the same files as they were before. Raises OSError."""
    before = list(place.glob(f"{name.rpartition('-')[0]}-*"))
    with file_made_whole(place / name) as temporary, temporary.open("wb") as file:
        np.save(file, table)
    for old in before:
        with suppress(OSError):  # of another user, or gone
            old.unlink()


def _name(files: Sequence[Path], kind: str) -> str:
    try:
        stamps = [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in files)]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); replace the file") from error
    names = [os.path.relpath(file, files[0].parent) for file in files]
    return f".samerun-index-{_digest(FORMAT, kind, *names)}-{_digest(*stamps)}"


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
