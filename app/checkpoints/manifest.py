"""The manifest of a checkpoint: what each of its files was when it was written, and where each tensor is.

    {"format": 1, "files": {FILE: {"bytes": ..., "sha256": ...}},
     "tensors": {KEY: {PARAMETER: {"shape": [...], "dtype": "F32", "ranges": [[START, STOP, FILE], ...]}}}, "sha256": ...}

In the file FILE the elements START to STOP - 1 of the flattened tensor are the tensor `KEY/PARAMETER@START`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from app.checkpoints.durable import Stamp, telling
from app.errors import CheckpointError
from app.files import regular

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Range:
    """Consecutive elements of one tensor in a file."""

    key: str
    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """As safetensors names it."""
    start: int
    stop: int


@dataclass(frozen=True)
class FileEntry:
    """What a rank wrote: small, to be gathered from all ranks for `commit`."""

    file: str
    stamp: Stamp
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Stored:
    """Where a tensor is."""

    shape: tuple[int, ...]
    dtype: str
    ranges: list[tuple[int, int, str]]
    """Start, stop and file, sorted; they cover each element once."""

    def problem(self) -> str | None:
        """Say what is wrong with the ranges, if anything is."""
        covered = 0
        for start, stop, file in self.ranges:
            if start > covered:
                return f"elements {covered} to {start - 1} are in no file"
            if start < covered:
                return f"elements {start} to {min(covered, stop) - 1} are in two files, one of them {file}"
            covered = stop
        size = prod(self.shape)
        if covered < size:
            return f"elements {covered} to {size - 1} are in no file"
        return f"it has {size} elements, and {covered} are in files" if covered > size else None


Tensors = dict[str, dict[str, Stored]]
"""Where each tensor is, by key and by parameter name."""


def tensor_name(key: str, name: str, start: int) -> str:
    """Return the name, inside a file, of the elements from `start` of a tensor."""
    return f"{key}/{name}@{start}"


def put_together(final: Path, entries: Sequence[FileEntry]) -> Tensors:
    """Return where each tensor of the checkpoint `final` is, of what all ranks wrote.

    Sorts, and then compares neighbours: n log n in the number of ranges. Raises CheckpointError if the ranges do not cover
    each tensor exactly once, or if ranks differ in a shape or dtype.
    """
    tensors: Tensors = {}
    for entry in entries:
        for part in entry.ranges:
            stored = tensors.setdefault(part.key, {}).setdefault(part.name, Stored(part.shape, part.dtype, []))
            if (stored.shape, stored.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"{final} cannot be written: {part.key} of {part.name} is {stored.dtype} {stored.shape} on one rank "
                    f"and {part.dtype} {part.shape} in {entry.file}. The checkpoints before it are as they were."
                )
            if part.start < part.stop:
                stored.ranges.append((part.start, part.stop, entry.file))
    for key, name, stored in _each(tensors):
        stored.ranges.sort()
        if problem := stored.problem():
            raise CheckpointError(
                f"{final} cannot be written: of {key} of {name}, {problem}. The checkpoints before it are as they were."
            )
    return tensors


def _each(tensors: Tensors) -> Iterator[tuple[str, str, Stored]]:
    return ((key, name, stored) for key, names in tensors.items() for name, stored in names.items())


def to_bytes(stamps: Mapping[str, Stamp], tensors: Tensors) -> bytes:
    """Return the content of the manifest's file."""
    content = {
        "format": FORMAT,
        "files": {file: {"bytes": stamp.size_bytes, "sha256": stamp.sha256} for file, stamp in stamps.items()},
        "tensors": {
            key: {name: {"shape": it.shape, "dtype": it.dtype, "ranges": it.ranges} for name, it in names.items()}
            for key, names in tensors.items()
        },
    }
    return _sealed(json.dumps(content).encode())


def _sealed(content: bytes) -> bytes:
    """Append the SHA-256 of a JSON object to it as its last entry, so that a change of any byte shows."""
    return content[:-1] + b', "sha256": "' + hashlib.sha256(content).hexdigest().encode() + b'"}\n'


_SEAL_BYTES = len(_sealed(b"{}")) - 1


def read(folder: Path) -> tuple[dict[str, Stamp], Tensors]:
    """Return the files of a checkpoint and where each tensor is in them.

    Raises CheckpointError if the manifest is missing, not the one that was written, or of another version.
    """
    path = folder / MANIFEST
    with telling(path, "read"):
        try:
            raw = regular.content(path)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path} is missing: {folder} is not a checkpoint that can be used.") from None
    if raw != _sealed(raw[:-_SEAL_BYTES] + b"}"):
        raise CheckpointError(f"{path} is truncated or has changed since it was written: its checkpoint cannot be used.")
    content = json.loads(raw)
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is of format {content['format']}, and this version reads format {FORMAT}: use the version that wrote it."
        )
    stamps = {file: Stamp(it["bytes"], it["sha256"]) for file, it in content["files"].items()}
    tensors = {
        key: {
            name: Stored(tuple(it["shape"]), it["dtype"], [(start, stop, file) for start, stop, file in it["ranges"]])
            for name, it in names.items()
        }
        for key, names in content["tensors"].items()
    }
    for key, name, stored in _each(tensors):
        if problem := stored.problem():
            raise CheckpointError(f"{path} is inconsistent: of {key} of {name}, {problem}. Its checkpoint cannot be used.")
    return stamps, tensors
