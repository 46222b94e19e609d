"""HDF5 and LMDB: a file or database for each split; opened by `images.open_containers`.

Sample i is the i-th record of the split, and its image is decoded as in an image folder: a recipe gives the same run over all
of them. Files are opened by each process that reads them: neither library can use what was opened before a fork.

HDF5, `train.h5`: the dataset `images` holds image files, as variable-length uint8 [N], or pixels, uint8 [N, H, W], [N, H, W, C]
or [N, C, H, W]; `labels` whole numbers [N]. Other names for them go into data.image_column and data.label_column. Names of the
classes are strings in the dataset `classes`.

LMDB, `train.lmdb`. There is no custom for a data set in LMDB; this is what is read and written here:

    00000000, 00000001, ...   the image file of each sample, unchanged
    __labels__                the labels of all samples: int64, little-endian
    __len__                   the number of samples, in digits
    __classes__               the names of the classes: a JSON list; without it they are 0 up to the largest label
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import reading
from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.images import Images, NoSplitError, StoredImage, class_names
from app.tasks.image_classification.sections import DataRecipe

HDF5_IMAGES, HDF5_LABELS, HDF5_CLASSES = "images", "labels", "classes"
_HDF5_ERRORS = (KeyError, RuntimeError, TypeError, ValueError, MemoryError)
"""Errors of h5py, next to OSError, for a damaged file; the last by a damaged shape."""
LMDB_LABELS, LMDB_LENGTH, LMDB_CLASSES = b"__labels__", b"__len__", b"__classes__"
LMDB_LABEL_TYPE = np.dtype("<i8")


# HDF5 -----------------------------------------------------------------------------------------------------------------


def open_hdf5(data: DataRecipe, folder: Path, split: str, key: str) -> Images:
    """Open a split, as `open_containers` wants it."""
    path = next((place for suffix in ("", ".h5", ".hdf5") if (place := folder / f"{split}{suffix}").is_file()), None)
    if path is None:
        raise NoSplitError(f"{folder} contains no file {split}.h5 for {key}={split}; correct data.path or {key}")
    with reading(path, "replace it", errors=_HDF5_ERRORS), _hdf5_file(path) as file:
        import h5py

        image_set = _dataset(file, (HDF5_IMAGES, data.image_column), path, "image")
        label_set = _dataset(file, (HDF5_LABELS, data.label_column), path, "label")
        is_encoded = image_set.ndim == 1 and h5py.check_vlen_dtype(image_set.dtype) == np.uint8
        targets = label_set[()].reshape(-1)
        is_image = is_encoded or (image_set.dtype == np.uint8 and image_set.ndim in (3, 4))
        if not is_image or targets.dtype.kind not in "iu" or len(targets) != len(image_set):
            found = " and ".join(f"{it.name} is {it.dtype} {list(it.shape)}" for it in (image_set, label_set))
            raise DataError(
                f"{path}: {found}; store image files as variable-length uint8 [N], or pixels as uint8 [N, H, W], [N, H, W, C] "
                "or [N, C, H, W], and a whole number for each as label"
            )
        names: list[str] = []
        if HDF5_CLASSES in file and h5py.check_string_dtype(file[HDF5_CLASSES].dtype):
            names = file[HDF5_CLASSES].asstr(errors="surrogateescape")[()].tolist()
        return Images(
            read=functools.partial(_read_hdf5, path, path.stat().st_ino, image_set.name, is_encoded),
            size=len(targets),
            labels=targets.astype(np.int64),
            classes=tuple(names),
            where=str(path),
            prefix=f"{split}/",
        )


def _read_hdf5(path: Path, inode: int, dataset: str, is_encoded: bool, places: Sequence[int]) -> Iterator[StoredImage]:
    for place in places:
        name = f"sample {place} of {path}"
        with reading(name, f"replace {path.name}", errors=_HDF5_ERRORS):
            row = np.asarray(_hdf5_rows(path, inode, dataset, os.getpid())[place])
        yield StoredImage(row.tobytes() if is_encoded else row, name)


def _hdf5_file(path: Path) -> Any:
    """Return a file, open for reading without locks: many network file systems have none."""
    with extra("data.source=hdf5"):
        import h5py
    return h5py.File(path, "r", locking=False)


@functools.cache
def _hdf5_rows(path: Path, inode: int, dataset: str, process: int) -> Any:  # noqa: ARG001
    """Return a dataset, open in a process: to open it takes twice as long as to read a row."""
    return _hdf5_file(path)[dataset]


def _dataset(file: Any, names: Sequence[str], path: Path, what: str) -> Any:
    import h5py

    for name in names:
        if name in file and isinstance(file[name], h5py.Dataset):
            return file[name]
    wanted, found = ", ".join(names), ", ".join(file) or "nothing"
    raise DataError(f"{path} contains none of the datasets {wanted}, but {found}; set data.{what}_column to one of these")


# LMDB -----------------------------------------------------------------------------------------------------------------


def lmdb_key(index: int) -> bytes:
    """Return the key of a sample's image."""
    return b"%08d" % index


def open_lmdb(_: DataRecipe, folder: Path, split: str, key: str) -> Images:
    """Open a split, as `open_containers` wants it."""
    path = next((place for place in (folder / split, folder / f"{split}.lmdb") if place.exists()), None)
    if path is None:
        raise NoSplitError(f"{folder} contains no database {split}.lmdb for {key}={split}; correct data.path or {key}")
    file = path / "data.mdb" if path.is_dir() else path
    with reading(file, "replace it"):
        size_bytes, inode = file.stat().st_size, file.stat().st_ino
    database = _database(path, inode)
    expected_bytes = (database.info()["last_pgno"] + 1) * database.stat()["psize"]
    if size_bytes < expected_bytes:  # to read beyond its end would end the process without a word
        raise DataError(f"{file} is truncated: it has {size_bytes} of {expected_bytes} bytes; replace it")
    with _transaction(path, inode) as transaction:
        labels, length = transaction.get(LMDB_LABELS, b""), transaction.get(LMDB_LENGTH, b"")
        classes = transaction.get(LMDB_CLASSES)
        entries = transaction.stat()["entries"] - 2 - (classes is not None)
    if length != b"%d" % entries or len(labels) != LMDB_LABEL_TYPE.itemsize * entries:
        found = f"its __labels__ have {len(labels)} bytes and its __len__ is {length[:20]!r}"
        raise DataError(f"{path} holds {entries} images, but {found}; write it as described in docs/data-formats.md")
    return Images(
        read=functools.partial(_read_lmdb, path, inode),
        size=entries,
        labels=np.frombuffer(labels, LMDB_LABEL_TYPE).astype(np.int64),
        classes=() if classes is None else class_names(classes, f"__classes__ of {path}"),
        where=str(path),
        prefix=f"{split}/",
    )


def _read_lmdb(path: Path, inode: int, places: Sequence[int]) -> Iterator[StoredImage]:
    for place in places:
        name = f"record {lmdb_key(place).decode()} of {path}"
        with _transaction(path, inode) as transaction:
            content: bytes | None = transaction.get(lmdb_key(place))
        if content is None:
            raise DataError(f"{name} does not exist; write it as described in docs/data-formats.md")
        yield StoredImage(content, name)


_OPEN_DATABASES: dict[tuple[Path, int], tuple[int, Any]] = {}
"""Process and `lmdb.Environment`, by path and inode: LMDB allows one in a process, so all readers share it."""


def _database(path: Path, inode: int) -> Any:
    """Return the database, open for reading in this process, without locks: no process writes. Raises DataError."""
    with extra("data.source=lmdb"):
        import lmdb
    process, database = _OPEN_DATABASES.get((path, inode), (0, None))
    if process != os.getpid():
        if database is not None:  # opened before a fork
            database.close()
        with reading(f"the LMDB database {path}", "replace it", errors=(lmdb.Error,)):
            # Samples are read in any order: the system need not read what follows one.
            database = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
        _OPEN_DATABASES[path, inode] = os.getpid(), database
    return database


@contextmanager
def _transaction(path: Path, inode: int) -> Iterator[Any]:
    """Give a transaction. Raises DataError if what is read in it is damaged."""
    import lmdb

    with reading(path, "replace it", errors=(lmdb.Error,)), _database(path, inode).begin() as transaction:
        yield transaction
