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
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.containers import OwnHandle, class_names, decoded, open_records
from app.tasks.image_classification.data.source import Data, first_line
from app.tasks.image_classification.data.split_names import NoSplitError
from app.tasks.image_classification.sections import Sections

LABELS, LENGTH, CLASSES = b"__labels__", b"__len__", b"__classes__"
LABEL_TYPE = np.dtype("<i8")


def key_of(index: int) -> bytes:
    """Return the key of a sample's picture."""
    return b"%08d" % index


@dataclass(frozen=True, eq=False)
class LmdbRecords:
    """The records of a split."""

    encoded: ClassVar[bool] = True
    opened: Database
    classes: tuple[str, ...] | None
    labels: np.ndarray
    """int64 [N]."""

    @property
    def where(self) -> str:
        """The database."""
        return str(self.opened.path)

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, as `Records` says."""
        return decoded(self.content(index), channels, name=f"record {key_of(index).decode()} of {self.where}")

    def content(self, index: int) -> bytes:
        """Return a picture's file, as `Records` says."""
        return _value(self.opened, key_of(index))


def open_lmdb(recipe: Sections) -> Data:
    """Open the splits, as `open_records` does."""
    return open_records(recipe, _open_split)


def _open_split(folder: Path, split: str, key: str) -> LmdbRecords:
    path = next((place for place in (folder / split, folder / f"{split}.lmdb") if place.exists()), None)
    if path is None:
        raise NoSplitError(f"{folder} contains no database {split}.lmdb for {key}={split}; correct data.path or {key}")
    opened = database(path)
    opened.close()  # it may have been written again since
    try:
        return _records(opened)
    except DataError:
        opened.close()
        raise


def _records(opened: Database) -> LmdbRecords:
    _check_size(opened)
    stored, length = _value(opened, LABELS), _value(opened, LENGTH)
    with _reading(opened) as transaction:
        classes = transaction.get(CLASSES)
        entries = transaction.stat()["entries"] - 2 - (classes is not None)
    if length != b"%d" % entries or len(stored) != LABEL_TYPE.itemsize * entries:
        raise DataError(
            f"{opened.path} holds {entries} pictures, but its __labels__ have {len(stored)} bytes and its "
            f"__len__ is {length[:20]!r}; write it as described in docs/containers.md"
        )
    names = None if classes is None else class_names(classes, f"__classes__ of {opened.path}")
    return LmdbRecords(opened, names, np.frombuffer(stored, LABEL_TYPE).astype(np.int64))


class Database(OwnHandle[Any]):
    """A database that is opened when it is used; `database` gives it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return database, (self.path,)


_DATABASES: WeakValueDictionary[tuple[Path, int], Database] = WeakValueDictionary()
"""Open databases by path and inode. LMDB allows one handle per process, so all readers share it."""


def database(path: Path) -> Database:
    """Return the database at a path, the same to all readers in this process. Raises DataError if there is none."""
    try:
        key = path.resolve(), path.stat().st_ino
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); replace it") from error
    return _DATABASES.setdefault(key, Database(open_database, path))


def open_database(path: Path) -> Any:
    """Return an `lmdb.Environment` that is open for reading, without locks: nobody writes. Raises DataError."""
    with extra("data.source=lmdb"):
        import lmdb
    try:
        # Samples are read in any order: the system need not read what follows one.
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise DataError(f"{path} cannot be opened as an LMDB database ({first_line(error)}); replace it") from error


@contextmanager
def _reading(opened: Database) -> Iterator[Any]:
    """Give a transaction. Raises DataError if what is read in it is damaged."""
    import lmdb

    try:
        with opened().begin() as transaction:
            yield transaction
    except lmdb.Error as error:
        raise DataError(f"{opened.path} is damaged ({first_line(error)}); replace it") from error


def _check_size(opened: Database) -> None:
    """Check that the file is as long as it says: to read beyond its end would end the process without a word."""
    environment, path = opened(), opened.path
    file = path / "data.mdb" if path.is_dir() else path
    size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if file.stat().st_size < size_bytes:
        raise DataError(f"{file} is truncated: it has {file.stat().st_size} of {size_bytes} bytes; replace it")


def _value(opened: Database, key: bytes) -> bytes:
    with _reading(opened) as transaction:
        value: bytes | None = transaction.get(key)
    if value is None:
        raise DataError(f"{opened.path} has no record {key.decode()}; write it as described in docs/containers.md")
    return value
