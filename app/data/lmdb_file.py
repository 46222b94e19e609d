"""LMDB: a database for each split, `train.lmdb`.

There is no custom for what a data set looks like in LMDB; this is what is read and written here:

    00000000, 00000001, ...   the picture's file of each sample, as it is
    __labels__                the labels of all samples: int64, little-endian
    __len__                   the number of samples, in digits
    __classes__               the names of the classes: a JSON list; without it they are 0 up to the largest label
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from app.data.containers import class_names, decoded, open_records, opened
from app.data.extras import extra
from app.data.source import Source, first_line
from app.errors import DataError
from app.recipe.schema import Recipe

LABELS, LENGTH, CLASSES = b"__labels__", b"__len__", b"__classes__"
LABEL_TYPE = np.dtype("<i8")


def key_of(index: int) -> bytes:
    """Return the key of a sample's picture."""
    return b"%08d" % index


@dataclass(frozen=True, eq=False)
class LmdbRecords:
    """The records of a split."""

    path: Path
    classes: tuple[str, ...] | None
    labels: np.ndarray
    """int64 [N]."""

    @property
    def where(self) -> str:
        """The database."""
        return str(self.path)

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, as `Records` says."""
        return decoded(self.content(index), channels, name=f"record {key_of(index).decode()} of {self.where}")

    def content(self, index: int) -> bytes:
        """Return a picture's file, as `Records` says."""
        return _value(self.path, key_of(index))


def open_lmdb(recipe: Recipe) -> tuple[Source, Source]:
    """Return the training and the test split, as `open_records` does."""
    return open_records(recipe, _open_split)


def _open_split(folder: Path, split: str, key: str) -> LmdbRecords:
    path = next((place for place in (folder / split, folder / f"{split}.lmdb") if place.exists()), None)
    if path is None:
        raise DataError(f"{folder} holds no database {split}.lmdb for {key}={split}; correct data.path or {key}")
    _check_size(path)
    stored, length = _value(path, LABELS), _value(path, LENGTH)
    with _reading(path) as transaction:
        classes = transaction.get(CLASSES)
        entries = transaction.stat()["entries"] - 2 - (classes is not None)
    if length != b"%d" % entries or len(stored) != LABEL_TYPE.itemsize * entries:
        raise DataError(
            f"{path} holds {entries} pictures, but its __labels__ are {len(stored)} bytes and its __len__ is {length[:20]!r}; "
            "write it as docs/data.md says"
        )
    names = None if classes is None else class_names(classes, f"__classes__ of {path}")
    return LmdbRecords(path, names, np.frombuffer(stored, LABEL_TYPE).astype(np.int64))


def open_database(path: Path) -> Any:
    """Return an `lmdb.Environment` that is open for reading, without locks: nobody writes. Raises DataError."""
    with extra("data.source=lmdb", "lmdb"):
        import lmdb
    try:
        # Samples are read in any order: the system need not read what follows one.
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise DataError(f"{path} cannot be opened as an LMDB database ({first_line(error)}); replace it") from error


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Give a transaction. Raises DataError if what is read in it is damaged."""
    import lmdb

    try:
        with opened(open_database, path).begin() as transaction:
            yield transaction
    except lmdb.Error as error:
        raise DataError(f"{path} is damaged ({first_line(error)}); replace it") from error


def _check_size(path: Path) -> None:
    """Check that the file is as long as it says: to read beyond its end would end the process without a word."""
    environment = opened(open_database, path)
    file = path / "data.mdb" if path.is_dir() else path
    size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if file.stat().st_size < size_bytes:
        raise DataError(f"{file} was cut: it has {file.stat().st_size} bytes, and {size_bytes} were written; replace it")


def _value(path: Path, key: bytes) -> bytes:
    with _reading(path) as transaction:
        value: bytes | None = transaction.get(key)
    if value is None:
        raise DataError(f"{path} has no record {key.decode()}; write it as docs/data.md says")
    return value
