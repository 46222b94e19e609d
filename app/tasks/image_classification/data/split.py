"""One split of pictures of one size: arrays, in memory or in files that all processes of a node share.

A split on disk is a folder:

    images.npy    uint8 [N, C, H, W]
    labels.npy    int64 [N]
    split.json    the names of the classes, and the fingerprint of both arrays

It is written under a temporary name, brought to the disk and renamed: what has its name is whole. Opened, the files are
mapped: the system reads what is looked at, once for all processes, and takes the memory back when it needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.errors import DataError
from app.files import other_libraries
from app.files.atomic_files import made_whole, sync
from app.files.lines import parsed
from app.tasks.image_classification.data.source import fingerprint

IMAGES, LABELS, ABOUT = "images.npy", "labels.npy", "split.json"
FORMAT = 1
"""Version of this layout, in split.json; other versions are refused."""
CHUNK_BYTES = 4 << 20
"""Pictures that are read, resized or written at a time, which bounds the memory for building a split of any size."""


class Images:
    """Pictures of one size, uint8 [N, C, H, W]; pickled, those in a file are the file's place, not its content."""

    def __init__(self, array: np.ndarray, place: tuple[Path, int] | None = None) -> None:
        self.array = array
        self._place = place

    @classmethod
    def mapped(cls, path: Path, offset_bytes: int, shape: tuple[int, ...]) -> Images:
        """Return those that a file holds from `offset_bytes` on; the file must be long enough."""
        if 0 in shape:  # of which there is nothing to map
            return cls(np.empty(shape, np.uint8))
        # A plain view: NumPy's memmap runs Python code at each look-up, for some microseconds.
        return cls(np.asarray(np.memmap(path, np.uint8, mode="r", offset=offset_bytes, shape=shape)), (path, offset_bytes))

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Callable[..., Images], tuple[Any, ...]]:
        if self._place is None:
            return Images, (self.array,)
        return Images.mapped, (*self._place, self.array.shape)


@dataclass(frozen=True, eq=False)
class Split:
    """Pictures and labels of one split; the labels may be of any integer type."""

    images: Images
    labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """That of sources: of the shape, the classes, all labels, and the pixels of some pictures."""
        array, shape = self.images.array, str(self.images.array.shape).encode()
        return fingerprint(self.classes, len(array), lambda index: shape + array[index].tobytes(), listing=[self.labels])


class Unstored(NamedTuple):
    """A split that is being read or made, piece by piece."""

    shape: tuple[int, ...]
    """[N, C, H, W] of all pictures."""
    chunks: Iterable[np.ndarray]
    """The pictures in order, in pieces uint8 [n, C, H, W]."""
    labels: np.ndarray
    classes: tuple[str, ...]

    def in_memory(self) -> Split:
        """Return all of it as arrays of this process."""
        empty = np.empty((0, *self.shape[1:]), np.uint8)
        return Split(Images(np.concatenate([empty, *self.chunks])), self.labels, self.classes)


def pictures_in_a_chunk(shape: tuple[int, ...]) -> int:
    """Return how many pictures of a split [N, C, H, W] make about CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES // max(1, int(np.prod(shape[1:], dtype=np.int64))))


def write_split(folder: Path, split: Unstored) -> None:
    """Write a split into `folder`, which is made: whole or not at all. Raises DataError if it cannot be, or is there."""
    try:
        with made_whole(folder) as temporary:
            _write_npy(temporary / IMAGES, np.uint8, split.shape, split.chunks)
            _write_npy(temporary / LABELS, np.int64, split.labels.shape, [split.labels.astype(np.int64)])
            written = Split(_mapped(temporary), other_libraries.array(temporary / LABELS), split.classes)
            about = {"format": FORMAT, "fingerprint": written.fingerprint, "classes": list(split.classes)}
            (temporary / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
            for file in (IMAGES, LABELS, ABOUT):
                sync(temporary / file)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Free space there, or choose another folder"
        ) from error


def open_split(folder: Path) -> Split:
    """Return the split in a folder, mapped. Raises DataError if a file is missing, of another layout, or has changed."""
    try:
        about = parsed((folder / ABOUT).read_bytes())
        if about["format"] != FORMAT:
            raise DataError(f"{folder} has the layout {about['format']}, and this version reads {FORMAT}; pack it again")
        labels = np.asarray(other_libraries.array(folder / LABELS))
        split = Split(_mapped(folder), labels, tuple(about["classes"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is not a complete split of arrays ({error}); pack it again, or correct data.path") from error
    if split.fingerprint != about["fingerprint"]:
        raise DataError(f"{folder} has changed since it was written (its fingerprint differs); pack it again")
    return split


def _mapped(folder: Path) -> Images:
    array = other_libraries.array(folder / IMAGES)
    if array.dtype != np.uint8 or array.ndim != 4:
        raise ValueError(f"{IMAGES} is {array.dtype} with {array.ndim} dimensions, not uint8 with 4")
    return Images.mapped(folder / IMAGES, array.offset, array.shape)


def _write_npy(path: Path, kind: type[np.generic], shape: tuple[int, ...], chunks: Iterable[np.ndarray]) -> None:
    """Write an array that comes in pieces along its first dimension."""
    rows = 0
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            assert chunk.dtype == kind, (chunk.dtype, kind)
            assert chunk.shape[1:] == shape[1:], (chunk.shape, shape)
            file.write(np.ascontiguousarray(chunk).data)
            rows += len(chunk)
    assert rows == shape[0], (rows, shape)
