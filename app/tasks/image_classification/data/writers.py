"""Writing containers: a split's records, in their order, as the modules that read each format say.

All is written into a hidden folder beside the place, brought to the disk, and renamed; of a set of shards the first comes
last, so that a set without it is one that was never finished. Libraries are imported where they are used.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.data.extras import extra
from app.errors import DataError
from app.files.whole import file_made_whole, sync
from app.tasks.image_classification.data import hdf5, lmdb_file, tar_shards, tfrecords
from app.tasks.image_classification.data.source import first_line

SHARD_BYTES = 1 << 30
"""Approximate size of a shard: large enough to read efficiently, and a thousandth of a large data set."""
BATCH = 128
"""Records collected in memory before they are written."""
HDF5_CHUNK = 64
"""Rows per chunk; reading one row reads its whole chunk."""
LMDB_BYTES = 1 << 40
"""Largest size of a database; it reserves address space only."""


@dataclass(frozen=True)
class Record:
    """A picture's file and its label."""

    key: str
    """What the sample was called where it came from: an image folder's relative path without the extension, say."""
    encoded: bytes
    """The picture's file, stored as it is."""
    extension: str
    """Of the picture's file, without the dot, in lower case: jpg, png, ..."""
    label: int
    """In 0 .. number of classes - 1."""


Writer = Callable[[Path, str, Sequence[str], Iterable[Record]], None]
"""From folder, split, class names and records to a container in the folder, with the samples numbered as the records come.

Nothing is seen under the container's name before it is complete. Raises DataError if there is one for that split already, if
there are no records, or if a label is not that of a class.
"""


def write_webdataset(
    folder: Path, split: str, classes: Sequence[str], records: Iterable[Record], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `split-000000.tar` and so on, as `Writer` says; keys of the samples are their numbers."""
    with _placed(folder, f"{split}-*.tar") as place:
        for number, shard in enumerate(_in_shards(_checked(records, classes), shard_bytes)):
            with tarfile.open(place / f"{split}-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                _add(tar, tar_shards.CLASSES, json.dumps(list(classes)).encode())
                for index, record in shard:
                    if record.extension not in tar_shards.PICTURES:
                        raise DataError(f"{record.key}.{record.extension} is not a picture ({', '.join(tar_shards.PICTURES)})")
                    _add(tar, f"{index:08d}.{record.extension}", record.encoded)
                    _add(tar, f"{index:08d}.{tar_shards.LABEL}", str(record.label).encode())


def write_tfrecord(
    folder: Path, split: str, classes: Sequence[str], records: Iterable[Record], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `split-00000-of-00001.tfrecord` and so on, as `Writer` says, and `labels.txt` for all splits of the folder."""
    with _placed(folder, f"{split}-*-of-*.tfrecord") as place:
        _write_classes(folder, classes)
        parts: list[Path] = []
        for shard in _in_shards(_checked(records, classes), shard_bytes):
            parts.append(place / str(len(parts)))
            with parts[-1].open("wb") as file:
                for _, record in shard:
                    example = _example(record, classes)
                    length = tfrecords.HEADER.pack(len(example), 0)[:8]
                    file.write(length + tfrecords.FOOTER.pack(tfrecords.masked_crc(length)))
                    file.write(example + tfrecords.FOOTER.pack(tfrecords.masked_crc(example)))
        for number, part in enumerate(parts):
            part.rename(place / f"{split}-{number:05d}-of-{len(parts):05d}.tfrecord")


def write_hdf5(folder: Path, split: str, classes: Sequence[str], records: Iterable[Record]) -> None:
    """Write `split.h5`, as `Writer` says; a dataset `keys` keeps those of the records."""
    with extra("writing HDF5", "h5py"):
        import h5py
    kinds = {hdf5.IMAGES: h5py.vlen_dtype(np.uint8), hdf5.LABELS: np.int64, "keys": h5py.string_dtype()}
    with _placed(folder, f"{split}.h5") as place, h5py.File(place / f"{split}.h5", "w") as file:
        file.create_dataset(hdf5.CLASSES, data=[os.fsencode(name) for name in classes], dtype=h5py.string_dtype())
        columns = [
            file.create_dataset(name, (0,), kind, maxshape=(None,), chunks=(HDF5_CHUNK,)) for name, kind in kinds.items()
        ]
        images, labels, keys = columns
        checked, size = _checked(records, classes), 0
        while rows := list(itertools.islice(checked, BATCH)):
            for column in columns:
                column.resize(size + len(rows), axis=0)
            for number, row in enumerate(rows, size):  # one by one: at once, files of one size would be taken for a matrix
                images[number] = np.frombuffer(row.encoded, np.uint8)
            labels[size:] = [row.label for row in rows]
            keys[size:] = [os.fsencode(row.key) for row in rows]
            size += len(rows)


def write_lmdb(folder: Path, split: str, classes: Sequence[str], records: Iterable[Record]) -> None:
    """Write the folder `split.lmdb`, as `Writer` says."""
    with extra("writing LMDB", "lmdb"):
        import lmdb
    labels = array("q")
    with _placed(folder, f"{split}.lmdb") as place:
        checked = _checked(records, classes)
        try:
            with lmdb.open(str(place / f"{split}.lmdb"), map_size=LMDB_BYTES, lock=False) as environment:
                while rows := list(itertools.islice(checked, BATCH)):
                    with environment.begin(write=True) as transaction:
                        for row in rows:
                            transaction.put(lmdb_file.key_of(len(labels)), row.encoded, append=True)
                            labels.append(row.label)
                with environment.begin(write=True) as transaction:
                    transaction.put(lmdb_file.LABELS, np.array(labels, lmdb_file.LABEL_TYPE).tobytes())
                    transaction.put(lmdb_file.LENGTH, str(len(labels)).encode())
                    transaction.put(lmdb_file.CLASSES, json.dumps(list(classes)).encode())
        except lmdb.Error as error:
            raise DataError(_unwritable(folder, first_line(error))) from error


WRITERS: dict[str, Writer] = {
    "webdataset": write_webdataset,
    "hdf5": write_hdf5,
    "lmdb": write_lmdb,
    "tfrecord": write_tfrecord,
}
"""By the value of data.source that reads what is written."""


def _checked(records: Iterable[Record], classes: Sequence[str]) -> Iterator[Record]:
    """Yield the records. Raises DataError if one's label is not that of a class, or there are none."""
    record = None
    for record in records:
        if not 0 <= record.label < len(classes):
            raise DataError(f"{record.key} has label {record.label}, but labels must be in 0..{len(classes) - 1}; correct it")
        yield record
    if record is None:
        raise DataError("there are no samples to write")


def _in_shards(records: Iterator[Record], shard_bytes: int) -> Iterator[Iterator[tuple[int, Record]]]:
    """Yield shards of about `shard_bytes`: iterators of numbered records, each used up before the next is asked for."""
    numbered = enumerate(records)

    def shard(first: tuple[int, Record]) -> Iterator[tuple[int, Record]]:
        yield first
        size_bytes = len(first[1].encoded)
        while size_bytes < shard_bytes and (following := next(numbered, None)):
            yield following
            size_bytes += len(following[1].encoded)

    while first := next(numbered, None):
        yield shard(first)


@contextmanager
def _placed(folder: Path, pattern: str) -> Iterator[Path]:
    """Give a temporary folder, and move what is in it into `folder` when the block ends well. Raises DataError."""
    taken = sorted(folder.glob(pattern))
    if taken:
        raise DataError(f"{taken[0]} already exists; remove it, or write to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".samerun-", dir=folder) as temporary:
            place = Path(temporary)
            yield place
            for file in place.rglob("*"):
                sync(file)
            for file in sorted(place.iterdir(), reverse=True):
                file.rename(folder / file.name)
        sync(folder)
    except OSError as error:
        raise DataError(_unwritable(folder, error.strerror or str(error))) from error


def _unwritable(folder: Path, why: str) -> str:
    return f"{folder} cannot be written ({why}); free space there, or write to another folder"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _example(record: Record, classes: Sequence[str]) -> bytes:
    """Return a serialized tf.train.Example with the features of ImageNet's files that are known."""
    example = tfrecords.example_class()()
    feature = example.features.feature
    feature[tfrecords.LABEL].int64_list.value.append(record.label)
    texts = {"class/text": classes[record.label], "format": record.extension, "filename": f"{record.key}.{record.extension}"}
    for name, text in texts.items():
        feature[f"image/{name}"].bytes_list.value.append(os.fsencode(text))
    feature[tfrecords.IMAGE].bytes_list.value.append(record.encoded)
    content: bytes = example.SerializeToString(deterministic=True)
    return content


def _write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write labels.txt, or check that the one of another split says the same."""
    path = folder / tfrecords.CLASSES
    known = tfrecords.read_classes(folder)
    if known not in (None, tuple(classes)):
        raise DataError(f"{path} lists other classes than this split; write both splits with the same classes")
    broken = [name for name in classes if "\n" in name or "\r" in name]
    if broken:
        raise DataError(f"the class {broken[0]!r} has a line break in its name, which {path.name} cannot store; rename it")
    text = "".join(f"{number}:{name}\n" for number, name in enumerate(classes))
    with file_made_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
