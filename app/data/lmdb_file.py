"""LMDB: a database for each split, `train.lmdb`.

There is no custom for what a data set looks like in LMDB; this is what is read and written here:

    00000000, 00000001, ...   the picture's file of each sample, as it is
    __labels__                the labels of all samples: int64, little-endian
    __len__                   the number of samples, in digits
    __classes__               the names of the classes: a JSON list; without it they are 0 up to the largest label
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from app.data.containers import decoded, open_records, opened
from app.data.extras import extra
from app.data.source import Source, first_line
from app.errors import DataError
from app.recipe import Recipe

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
    labels = np.frombuffer(_value(path, LABELS), LABEL_TYPE).astype(np.int64)
    length = int(_value(path, LENGTH))
    with opened(open_database, path).begin() as transaction:
        classes = transaction.get(CLASSES)
        entries = transaction.stat()["entries"] - 2 - (classes is not None)
    if not len(labels) == length == entries:
        raise DataError(
            f"{path} holds {entries} pictures and {len(labels)} labels, and its __len__ is {length}; write it again"
        )
    return LmdbRecords(path, None if classes is None else tuple(json.loads(classes)), labels)


def open_database(path: Path) -> Any:
    """Return an `lmdb.Environment` that is open for reading, without locks: nobody writes. Raises DataError."""
    with extra("data.source=lmdb", "lmdb"):
        import lmdb
    try:
        # Samples are read in any order: the system need not read what follows one.
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise DataError(f"{path} cannot be opened as an LMDB database ({first_line(error)}); replace it") from error


def _check_size(path: Path) -> None:
    """Check that the file is as long as it says: to read beyond its end would end the process without a word."""
    environment = opened(open_database, path)
    file = path / "data.mdb" if path.is_dir() else path
    size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if file.stat().st_size < size_bytes:
        raise DataError(f"{file} was cut: it has {file.stat().st_size} bytes, and {size_bytes} were written; replace it")


def _value(path: Path, key: bytes) -> bytes:
    with opened(open_database, path).begin() as transaction:
        value: bytes | None = transaction.get(key)
    if value is None:
        raise DataError(f"{path} has no record {key.decode()}; write it as docs/data.md says")
    return value
