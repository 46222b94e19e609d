"""The columns of a `datasets.Dataset`: pictures row by row, labels all at once."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.errors import DataError
from app.tasks.image_classification.data.image_file import is_gray, opened
from app.tasks.image_classification.data.left_out import ALL, Rest
from app.tasks.image_classification.data.pictures import decode
from app.tasks.image_classification.data.source import check_labels

# Integer labels from this on are taken for something else (identifiers, say), not for classes.
MOST_CLASSES = 1 << 20
CHANNELS = (1, 3, 4)
"""Numbers of channels that tell channels from rows in an array of three dimensions."""


@dataclass(frozen=True, eq=False)
class RowReader:
    """Reads the pictures of one split, row by row."""

    rows: Any
    """A `datasets.Dataset` of one column: image files as they are stored, or arrays in numpy's format."""
    labels: np.ndarray
    """Those of the samples, int64 [N]."""
    where: str
    """The split and where it came from, as errors name it."""
    encoded: bool
    """Whether the rows hold image files; arrays of pixels otherwise."""
    channels: int = 3
    """That encoded pictures are decoded to; arrays have their own."""
    split: str = ""
    rest: Rest = ALL
    """Which of the rows are samples."""

    @classmethod
    def of(cls, rows: Any, column: str, labels: np.ndarray, *, where: str) -> RowReader:
        """Return a reader of a column of a `datasets.Dataset`. Raises DataError if it holds neither image files nor arrays."""
        import datasets

        feature = rows.features[column]
        rows = rows.select_columns([column])
        if isinstance(feature, datasets.Image):
            return cls(rows.cast_column(column, datasets.Image(decode=False)), labels, where, encoded=True)
        is_bytes = getattr(feature, "dtype", None) in ("binary", "large_binary")
        if isinstance(feature, datasets.Value) and not is_bytes:
            raise DataError(
                f"data.image_column={column}: {where} holds {feature.dtype} in that column, not images; use another column"
            )
        return cls(rows if is_bytes else rows.with_format("numpy"), labels, where, encoded=is_bytes)

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for index, value in zip(indices, self._values(indices), strict=True):
            if self.encoded:
                file, name = self._file(index, value)
                picture = decode(file, channels=self.channels, name=name)
            else:
                # A row without an image makes floats of all that are read with it.
                alone = value if np.asarray(value).dtype.kind in "iu" else self._values([index])[0]
                picture = picture_of(alone, name=self._name(index))
            yield picture, int(self.labels[index])

    def without(self, split: str, rest: Rest) -> RowReader:
        """Return a reader of the rest of the rows, which are of the split of this name."""
        return replace(self, split=split, rest=rest, labels=rest.of(self.labels))

    def content(self, index: int) -> bytes:
        """Return what the fingerprint covers of a picture: its file, or its pixels."""
        (value,) = self._values([index])
        if not self.encoded:
            picture = picture_of(value, name=self._name(index))
            return str(tuple(picture.shape)).encode() + picture.numpy().tobytes()
        file, name = self._file(index, value)
        try:
            return file.read_bytes() if isinstance(file, Path) else file.getvalue()
        except OSError as error:
            raise DataError(f"{name} cannot be read ({error.strerror}); replace or remove it") from error

    def file(self, index: int) -> bytes | None:
        """Return an encoded picture's file, and nothing of arrays. Raises DataError if it cannot be read."""
        return self.content(index) if self.encoded else None

    def is_gray(self, index: int) -> bool:
        """Return whether an encoded picture is grayscale; one that cannot be read, which `decode` reports, is not."""
        (value,) = self._values([index])
        try:
            with opened(*self._file(index, value)) as picture:
                return is_gray(picture)
        except DataError:
            return False

    def _values(self, indices: Sequence[int]) -> list[Any]:
        (values,) = self.rows[[self.rest.place(index) for index in indices]].values()
        return list(values)

    def _file(self, index: int, value: Any) -> tuple[Path | io.BytesIO, str]:
        """Return an encoded picture's file, and how an error names it."""
        name = self._name(index)
        if value is None:
            raise DataError(f"{name} has no image; remove it")
        content = value if isinstance(value, bytes) else value["bytes"]
        if content is not None:
            return io.BytesIO(content), name
        return Path(value["path"]), f"{value['path']} ({name})"

    def name(self, index: int) -> str:
        """Return how `data.leave_out` names a sample."""
        return f"{self.split}/{self.rest.place(index)}"

    def _name(self, index: int) -> str:
        return f"sample {self.rest.place(index)} of {self.where}"


def picture_of(value: Any, *, name: str) -> Tensor:
    """Return the picture, uint8 [C, H, W], in an array of numbers: [H, W], [H, W, C] or [C, H, W], with 1, 3 or 4 channels.

    Raises DataError if the array is none of these, or its numbers are not whole and in 0..255.
    """
    array = np.asarray(value)
    if value is None or (array.dtype.kind == "f" and np.isnan(array).all()):
        raise DataError(f"{name} has no image; remove it")
    if array.dtype.kind not in "iu":
        kind = "with rows of different lengths" if array.dtype.kind == "O" else f"of {array.dtype}"
        raise DataError(f"{name} is an array {kind}; store integers in 0..255 (uint8)")
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and array.shape[2] in CHANNELS:
        array = array.transpose(2, 0, 1)
    elif array.ndim != 3 or array.shape[0] not in CHANNELS:
        raise DataError(f"{name} has shape {array.shape}; store [H, W], [H, W, C] or [C, H, W], with C one of {CHANNELS}")
    if array.size == 0 or array.min() < 0 or array.max() > 255:
        found = f"numbers in {array.min()}..{array.max()}" if array.size else "no pixels"
        raise DataError(f"{name} has {found}; store integers in 0..255 (uint8)")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.uint8))


def read_labels(splits: Sequence[Any], column: str, where: Sequence[str]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return the class names, and the labels of each split (int64 [N]), of which the first is for training.

    The classes are those of a ClassLabel column; else, of the training split, the sorted different strings, or 0 up to the
    largest integer. `where` is what errors call each split, a `datasets.Dataset`. Raises DataError if a label is missing or not
    that of a class, or the column holds something else.
    """
    columns = [_column(split, column, name) for split, name in zip(splits, where, strict=True)]
    train_names, *others = (getattr(split.features[column], "names", None) for split in splits)
    for other, name in zip(others, where[1:], strict=True):
        if other != train_names:
            raise DataError(
                f"data.label_column={column}: {where[0]} has the classes {train_names}, {name} has {other}; make them the same"
            )
    if train_names is not None:
        names = train_names
    elif columns[0].dtype.kind == "O":
        names = sorted(set(columns[0].tolist()))
        columns = [_numbered(labels, names, name) for labels, name in zip(columns, where, strict=True)]
    else:
        names = numbers_up_to(int(columns[0].max(initial=0)), f"data.label_column={column}: {where[0]}")
    for labels, name in zip(columns, where, strict=True):
        check_labels(labels, len(names), where=name)
    return tuple(names), [labels.astype(np.int64) for labels in columns]


def _column(rows: Any, column: str, where: str) -> np.ndarray:
    """Return a column of integers, or of strings (as objects), none of them missing."""
    values = rows.select_columns([column]).with_format("arrow")[:].column(column)
    if values.null_count:
        index = values.is_null().to_pylist().index(True)
        raise DataError(
            f"sample {index} of {where} has no label ({values.null_count} of {len(values)} have none); remove these samples"
        )
    if not str(values.type).startswith(("int", "uint", "string", "large_string")):
        raise DataError(
            f"data.label_column={column}: {where} holds {values.type} in that column; labels must be "
            "ClassLabel, integers or strings"
        )
    return np.asarray(values.to_numpy())


def numbers_up_to(highest: int, where: str) -> list[str]:
    """Return the names of classes that have none: 0 up to the largest label. Raises DataError if that can be no label."""
    if highest >= MOST_CLASSES:
        raise DataError(f"{where} holds {highest}; labels must be 0 to the number of classes - 1")
    return [str(label) for label in range(highest + 1)]


def _numbered(labels: np.ndarray, names: list[str], where: str) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(names)}
    for index, label in enumerate(labels.tolist()):
        if label not in numbers:
            raise DataError(
                f"sample {index} of {where} has label {label!r}, which no training sample has; the labels are "
                f"{', '.join(map(repr, names[:20]))}{' ...' if len(names) > 20 else ''}"
            )
    return np.array([numbers[label] for label in labels.tolist()], dtype=np.int64)
