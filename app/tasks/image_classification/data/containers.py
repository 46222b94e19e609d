"""HDF5 and LMDB: a file or database for each split; and what they share with the shards of `shards.py`.

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
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.decoding import reading
from app.tasks.image_classification.data.images import (
    Data,
    Images,
    NoSplitError,
    StoredImage,
    completed,
    data_path,
    each_split,
    first_line,
    numbers_up_to,
    same_classes,
    without_left_out,
)
from app.tasks.image_classification.sections import DataRecipe, Sections

HDF5_IMAGES, HDF5_LABELS, HDF5_CLASSES = "images", "labels", "classes"
LMDB_LABELS, LMDB_LENGTH, LMDB_CLASSES = b"__labels__", b"__len__", b"__classes__"
LMDB_LABEL_TYPE = np.dtype("<i8")


def open_containers(recipe: Sections, open_split: Callable[[Path, str, str], Images]) -> Data:
    """Open the splits; `open_split` takes data.path, the name of a split, and the recipe's key that it is the value of.

    Image files become RGB, or grayscale with data.color=gray; without data.image_size all must have the size of the first.
    """
    data, folder = recipe.data, data_path(recipe)
    splits = without_left_out(each_split(data, lambda split, key: open_split(folder, split, key)), data)
    first = next(iter(splits.values()))
    named = {images.where: images.classes for images in splits.values() if images.classes}
    largest = 0 if first.labels is None else int(first.labels.max(initial=0))
    classes = same_classes(named) if named else numbers_up_to(largest, first.where)
    return completed(splits, recipe, classes=classes, channels=1 if data.color == "gray" else 3)


def class_names(content: bytes, where: str) -> tuple[str, ...]:
    """Return the names in a JSON list. Raises DataError if it is something else."""
    try:
        names = json.loads(content)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {content[:40]!r}, not a JSON list of class names; write it again")
    return tuple(names)


# HDF5 -----------------------------------------------------------------------------------------------------------------


def open_hdf5(recipe: Sections) -> Data:
    """Open the splits, as `open_containers` does."""
    return open_containers(recipe, functools.partial(_open_hdf5_split, recipe.data))


def _open_hdf5_split(data: DataRecipe, folder: Path, split: str, key: str) -> Images:
    path = next((place for suffix in ("", ".h5", ".hdf5") if (place := folder / f"{split}{suffix}").is_file()), None)
    if path is None:
        raise NoSplitError(f"{folder} contains no file {split}.h5 for {key}={split}; correct data.path or {key}")
    with _reading_hdf5(path, str(path)), _hdf5_file(path) as file:
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
        with _reading_hdf5(path, name):
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


@contextmanager
def _reading_hdf5(path: Path, what: str) -> Iterator[None]:
    """Raise DataError, saying that `what` cannot be read, for the many errors of the library."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, MemoryError) as error:  # the last by a damaged shape
        raise DataError(f"{what} cannot be read ({first_line(error)}); replace {path.name}") from error


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


def open_lmdb(recipe: Sections) -> Data:
    """Open the splits, as `open_containers` does."""
    return open_containers(recipe, _open_lmdb_split)


def _open_lmdb_split(folder: Path, split: str, key: str) -> Images:
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
        raise DataError(f"{path} holds {entries} images, but {found}; write it as described in docs/containers.md")
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
            raise DataError(f"{name} does not exist; write it as described in docs/containers.md")
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
        try:
            # Samples are read in any order: the system need not read what follows one.
            database = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
        except lmdb.Error as error:
            raise DataError(f"{path} cannot be opened as an LMDB database ({first_line(error)}); replace it") from error
        _OPEN_DATABASES[path, inode] = os.getpid(), database
    return database


@contextmanager
def _transaction(path: Path, inode: int) -> Iterator[Any]:
    """Give a transaction. Raises DataError if what is read in it is damaged."""
    import lmdb

    try:
        with _database(path, inode).begin() as transaction:
            yield transaction
    except lmdb.Error as error:
        raise DataError(f"{path} is damaged ({first_line(error)}); replace it") from error
