"""HDF5: a file for each split, with the datasets `images` and `labels`.

`images` holds picture files, as variable-length uint8 [N], or pixels, uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]; `labels`
whole numbers [N]. Other names for them go into data.image_column and data.label_column. Names of the classes are strings
in the dataset `classes`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.containers import OwnHandle, decoded, open_records
from app.tasks.image_classification.data.rows import picture_of
from app.tasks.image_classification.data.source import Data, first_line
from app.tasks.image_classification.data.split_names import NoSplitError
from app.tasks.image_classification.sections import Sections

IMAGES, LABELS, CLASSES = "images", "labels", "classes"
SUFFIXES = (".h5", ".hdf5")


@dataclass(frozen=True, eq=False)
class Hdf5Records:
    """The rows of a split."""

    opened: OwnHandle[OpenFile]
    classes: tuple[str, ...] | None
    labels: np.ndarray
    """int64 [N]."""
    images: str
    """Name of the dataset."""
    encoded: bool
    """Whether its rows hold picture files; pixels otherwise."""

    @property
    def where(self) -> str:
        """The file."""
        return str(self.opened.path)

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, as `Records` says; pixels keep their channels."""
        row, name = self._row(index), f"sample {index} of {self.where}"
        return decoded(row.tobytes(), channels, name=name) if self.encoded else picture_of(row, name=name)

    def content(self, index: int) -> bytes:
        """Return a picture's file, or its shape and pixels, as `Records` says."""
        row = self._row(index)
        return row.tobytes() if self.encoded else str(row.shape).encode() + row.tobytes()

    def _row(self, index: int) -> np.ndarray:
        with _reading(self.opened.path, f"sample {index} of {self.where}"):
            return np.asarray(self.opened().dataset(self.images)[index])


def open_hdf5(recipe: Sections) -> Data:
    """Open the splits, as `open_records` does."""
    images, labels = (IMAGES, recipe.data.image_column), (LABELS, recipe.data.label_column)
    return open_records(recipe, functools.partial(_open_split, images, labels))


def _open_split(images: Sequence[str], labels: Sequence[str], folder: Path, split: str, key: str) -> Hdf5Records:
    path = next((place for suffix in ("", *SUFFIXES) if (place := folder / f"{split}{suffix}").is_file()), None)
    if path is None:
        raise NoSplitError(f"{folder} contains no file {split}{SUFFIXES[0]} for {key}={split}; correct data.path or {key}")
    with _reading(path, str(path)):
        return _records(OwnHandle(OpenFile, path), images, labels)


def _records(opened: OwnHandle[OpenFile], images: Sequence[str], labels: Sequence[str]) -> Hdf5Records:
    path, file = opened.path, opened().file
    image_set, label_set = _dataset(file, images, path, "image"), _dataset(file, labels, path, "label")
    encoded = _holds_files(image_set)
    if not encoded and (image_set.dtype != np.uint8 or image_set.ndim not in (3, 4)):
        raise DataError(
            f"{path}: {image_set.name} is {image_set.dtype} {list(image_set.shape)}; store picture files as uint8 of "
            "variable length [N], or pixels as uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]"
        )
    targets = label_set[()].reshape(-1)
    if targets.dtype.kind not in "iu" or len(targets) != len(image_set):
        raise DataError(
            f"{path}: {label_set.name} is {label_set.dtype} {list(label_set.shape)}, but must be whole "
            f"numbers, one for each of the {len(image_set)} rows of {image_set.name}; write it again"
        )
    return Hdf5Records(opened, _classes(file), targets.astype(np.int64), image_set.name, encoded)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Say that `what` cannot be read where the library says so, which it does in many ways. Raises DataError."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, MemoryError) as error:  # the last by a damaged shape
        raise DataError(f"{what} cannot be read ({first_line(error)}); replace {path.name}") from error


class OpenFile:
    """An HDF5 file that is open for reading, without locks: many network file systems have none."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if it cannot be opened."""
        with extra("data.source=hdf5"):
            import h5py
        with _reading(path, str(path)):
            self.file = h5py.File(path, "r", locking=False)
        self._datasets: dict[str, Any] = {}

    def dataset(self, name: str) -> Any:
        """Return a dataset, kept open: to open it takes twice as long as to read a row."""
        if name not in self._datasets:
            self._datasets[name] = self.file[name]
        return self._datasets[name]

    def close(self) -> None:
        """Close the file and what is open of it."""
        self._datasets.clear()
        self.file.close()


def _dataset(file: Any, names: Sequence[str], path: Path, what: str) -> Any:
    for name in names:
        if name in file and hasattr(file[name], "ndim"):
            return file[name]
    raise DataError(
        f"{path} contains none of the datasets {', '.join(names)}, but {', '.join(file) or 'nothing'}; set "
        f"data.{what}_column to one of these"
    )


def _classes(file: Any) -> tuple[str, ...] | None:
    import h5py

    if CLASSES not in file or not h5py.check_string_dtype(file[CLASSES].dtype):
        return None
    return tuple(file[CLASSES].asstr(errors="surrogateescape")[()].tolist())


def _holds_files(images: Any) -> bool:
    """Return whether the rows are bytes of different lengths."""
    import h5py

    return bool(images.ndim == 1 and h5py.check_vlen_dtype(images.dtype) == np.uint8)
