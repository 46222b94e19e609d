"""The manifest of a checkpoint: size and hash of each file, and the place of each tensor.

    {"format": 1, "files": {FILE: {"bytes": ..., "sha256": ...}},
     "tensors": {KEY: {PARAMETER: {"shape": [...], "dtype": "F32", "ranges": [[START, STOP, FILE], ...]}}}, "sha256": ...}

In the file FILE the elements START to STOP - 1 of the flattened tensor are the tensor `KEY/PARAMETER@START`. Columns are ranges
[START, STOP, FILE, RUN, STRIDE]: of these elements the first RUN of every STRIDE. A manifest that has such is of format 2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from app.checkpoints import tensor_file
from app.errors import CheckpointError
from app.files.atomic_files import Stamp, disk_errors
from app.files.lines import is_count, parsed
from app.init.region import Region

FORMAT, WITH_COLUMNS = 1, 2
MANIFEST, STATE, BUFFERS = "manifest.json", "state.json", "buffers.safetensors"
FROZEN = "frozen"
"""The key of parameters that are not trained, and the folder of their file."""


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Safetensors' name of the dtype."""
    ranges: list[tuple[Region, str]]
    """Elements and file, sorted by the first element; in a manifest they cover each element once."""

    def problem(self) -> str | None:
        """Return the first problem of the ranges, if any."""
        size, count = prod(self.shape), 0
        open_yet: list[Region] = []  # which the next range can overlap
        for region, file in self.ranges:
            open_yet = [other for other in open_yet if other.end > region.start]
            for other in open_yet:
                if both := next(region.overlaps(other), None):
                    return f"elements {both.start} to {both.end - 1} are in two files, one of them {file}"
            open_yet.append(region)
            count += region.count
            if region.end > size:
                return f"it has {size} elements, and {file} has more"
        return f"{size - count} of its {size} elements are missing from all files" if count < size else None


Tensors = dict[str, dict[str, TensorEntry]]
"""The location of each tensor, by key and parameter name."""


@dataclass(frozen=True)
class FileEntry:
    """A file that a rank wrote; small, to be gathered from all ranks for `commit`."""

    file: str
    stamp: Stamp
    tensors: Tensors
    """The ranges of each tensor in the file."""


def tensor_name(key: str, name: str, start: int) -> str:
    """Return the name, inside a file, of the elements from `start` of a tensor."""
    return f"{key}/{name}@{start}"


def put_together(final: Path, entries: Sequence[FileEntry]) -> Tensors:
    """Return the location of each tensor of the checkpoint `final`, from the files of all ranks.

    Sorts, and then compares neighbors: n log n in the number of ranges. Raises CheckpointError if the ranges do not cover
    each tensor exactly once, or if ranks differ in a shape or dtype.
    """
    tensors: Tensors = {}
    for entry in entries:
        for key, name, part in each(entry.tensors):
            stored = tensors.setdefault(key, {}).setdefault(name, TensorEntry(part.shape, part.dtype, []))
            stored.ranges.extend(it for it in part.ranges if it[0].count)
            if (stored.shape, stored.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"{final} cannot be written: {key} of {name} is {stored.dtype} {stored.shape} on one rank and "
                    f"{part.dtype} {part.shape} in {entry.file}. Earlier checkpoints are unchanged."
                )
    for key, name, stored in each(tensors):
        stored.ranges.sort(key=lambda part: (part[0].start, part[1]))
        if problem := stored.problem():
            raise CheckpointError(f"{final} cannot be written: {key} of {name}: {problem}. Earlier checkpoints are unchanged.")
    return tensors


def each(tensors: Tensors) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yield each tensor with its key and its name."""
    return ((key, name, stored) for key, names in tensors.items() for name, stored in names.items())


def to_bytes(stamps: Mapping[str, Stamp], tensors: Tensors) -> bytes:
    """Return the content of the manifest's file."""
    has_columns = any(region.runs > 1 for _, _, stored in each(tensors) for region, _ in stored.ranges)
    content = {
        "format": WITH_COLUMNS if has_columns else FORMAT,
        "files": {file: {"bytes": stamp.size_bytes, "sha256": stamp.sha256} for file, stamp in stamps.items()},
        "tensors": {
            key: {
                name: {"shape": it.shape, "dtype": it.dtype, "ranges": [_to_json(*part) for part in it.ranges]}
                for name, it in names.items()
            }
            for key, names in tensors.items()
        },
    }
    return _sealed(json.dumps(content).encode())


def _to_json(region: Region, file: str) -> list[int | str]:
    flat: list[int | str] = [region.start, region.end, file]
    return flat if region.runs == 1 else [*flat, region.run, region.stride]


def _from_json(start: int, stop: int, file: str, run: int = 0, stride: int = 0) -> tuple[Region, str]:
    if not (all(map(is_count, (start, stop, run, stride))) and start <= stop):
        raise ValueError(f"{[start, stop, run, stride]} is not a range")
    if not stride:
        return Region.flat(start, stop - start), file
    if not 0 < run <= stride or stop - start < run or (stop - start - run) % stride:
        raise ValueError(f"{[start, stop, run, stride]} are not columns")
    return Region.made(start, ((stop - start - run) // stride + 1) * run, run, stride), file


def _sealed(content: bytes) -> bytes:
    """Append the SHA-256 of a JSON object to it as its last entry, so that a change of any byte is found."""
    return content[:-1] + b', "sha256": "' + hashlib.sha256(content).hexdigest().encode() + b'"}\n'


_SEAL_BYTES = len(_sealed(b"{}")) - 1


def read(folder: Path) -> tuple[dict[str, Stamp], Tensors]:
    """Return the files of a checkpoint and the location of each tensor.

    Raises CheckpointError if the manifest is missing, has changed, or is of another version.
    """
    path = folder / MANIFEST
    with disk_errors(path, "read"):
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path} is missing: {folder} is not a usable checkpoint.") from None
    if raw != _sealed(raw[:-_SEAL_BYTES] + b"}"):
        raise CheckpointError(f"{path} is truncated or has changed since it was written, so its checkpoint cannot be used.")
    try:
        return _checked(path, parsed(raw))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is not a manifest that a run wrote: {why}. Its checkpoint cannot be used.") from error


def _checked(path: Path, content: Any) -> tuple[dict[str, Stamp], Tensors]:
    if content["format"] not in (FORMAT, WITH_COLUMNS):
        raise CheckpointError(
            f"{path} has format {content['format']}, and this version reads formats {FORMAT} and "
            f"{WITH_COLUMNS}: use the version of Samerun that wrote it."
        )
    stamps = {file: Stamp(it["bytes"], it["sha256"]) for file, it in content["files"].items()}
    if not {STATE, BUFFERS} <= stamps.keys():
        raise ValueError(f"it does not name {STATE} and {BUFFERS}")
    for file, stamp in stamps.items():
        name = file.removeprefix(f"{FROZEN}/")
        if name in ("", "..") or name != PurePosixPath(name).name:
            raise ValueError(f"it names {file!r}, which is not in its folder")
        if not is_count(stamp.size_bytes) or not isinstance(stamp.sha256, str):
            raise ValueError(f"its entry of {file!r} is not a size and a SHA-256")
    tensors = {
        key: {
            name: TensorEntry(tuple(it["shape"]), it["dtype"], sorted(_from_json(*part) for part in it["ranges"]))
            for name, it in names.items()
        }
        for key, names in content["tensors"].items()
    }
    for key, name, stored in each(tensors):
        is_shape = all(map(is_count, stored.shape)) and is_count(prod(stored.shape))
        if not is_shape or not tensor_file.is_known(stored.dtype) or not all(file in stamps for _, file in stored.ranges):
            raise ValueError(f"{key} of {name} is {stored.dtype} {stored.shape} in {stored.ranges}")
        if problem := stored.problem():
            raise CheckpointError(f"{path} is inconsistent: {key} of {name}: {problem}. Its checkpoint cannot be used.")
    return stamps, tensors
