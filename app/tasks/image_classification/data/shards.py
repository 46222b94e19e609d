"""WebDataset and TFRecord: shards whose records are read by number, by an index that is made once.

Which files hold a split: in a folder, the split `train` is one file (`train.tar`) or a numbered set of them (`train-000000.tar`
and so on, `train-00000-of-00004.tfrecord`), with anything before that (`imagenet-train-000000.tar`), or all such files of a
sub-folder `train`. `pets-train-*.tar` is a pattern. Shards follow one another by their numbers.

The index is an array int64 [N, 4] in the user's cache (`arrays.cached`): when a file changes, another index is made. It is
mapped into memory, so that millions of records cost a process nothing, and all processes of a node share it.

WebDataset (https://github.com/webdataset/webdataset): tar files in which the members of a sample follow one another, `KEY.jpg`
and `KEY.cls`. The key ends at the first dot of a member's name; `cls` holds the label in digits; other members are skipped.
Names of the classes, for which WebDataset has no place, are a JSON list in the member `__classes__` that begins each shard
written here: its readers skip members with such names.

TFRecord files of `tf.train.Example`s, without TensorFlow (https://www.tensorflow.org/tutorials/load_data/tfrecord): a record
is its length, a masked CRC-32C of that, the content and a masked CRC-32C of that. Both are checked when the index is made, for
which all is read once, and the content's whenever a record is read. An Example has the features of ImageNet's files,
`image/encoded` and `image/class/label`, or those that data.image_column and data.label_column name, as the files of TensorFlow
Datasets do (`image`, `label`). Names of the classes are in `labels.txt` next to the files (`0:ant`), where TF-Slim keeps them.
Google's protobuf library, there with TensorBoard, parses the Examples in C, from a description of the message made here. The
package `tfrecord` reads streams only and checks no CRC.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from app.data.data_files import check_complete, numbered_sets, reading
from app.data.preprocessing import progress
from app.environment.topology import listed
from app.errors import DataError
from app.files.atomic_files import sync
from app.files.other_libraries import extra
from app.tasks.image_classification.data.arrays import Mapped, cached, stamps
from app.tasks.image_classification.data.decoding import IMAGE_SUFFIXES
from app.tasks.image_classification.data.images import Images, NoSplitError, StoredImage, class_names
from app.tasks.image_classification.sections import DataRecipe

MOST_OPEN_FILES = 128
"""Fewer than the 1,024 files that a process may usually have open, which is also how many shards ImageNet has as TFRecord."""
TAR_CLASSES, TAR_LABEL = "__classes__", "cls"
_INDEX = "index.npy"
HEADER = struct.Struct("<QI")
"""Header of a TFRecord: its length in bytes, and the masked CRC of these 8 bytes."""
FOOTER = struct.Struct("<I")
"""Footer of a TFRecord: the masked CRC of its content."""
Row = tuple[int, int, int]
"""For each record: offset of its content in the file, size (both in bytes), label."""


class RecordFiles(NamedTuple):
    """The files of a split, and the index of their records."""

    paths: tuple[Path, ...]
    rows: Mapped
    """int64 [N, 4]: number of the file, offset and size in bytes of the content, and label of each record."""

    def read(self, place: int, *, before: int = 0, after: int = 0) -> tuple[bytes, Path, int]:
        """Return the content of a record, with so many bytes around it, its file, and where in it the content begins.

        Raises DataError if the file cannot be read, or is shorter.
        """
        number, start, size_bytes, _ = self.rows.array[place].tolist()
        path = self.paths[number]
        with reading(path, "replace the file"):
            # A fork may share an open file, because a piece is read at its place and not where the file was left.
            piece = os.pread(_opened(path, self.rows.path).descriptor, before + size_bytes + after, start - before)
        if len(piece) < before + size_bytes + after:
            raise DataError(f"{path} is truncated: it ends before byte {start + size_bytes + after}; replace the file")
        return piece, path, start


class OpenFile:
    """A file that is open for reading, until nothing refers to it."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:  # it could be opened
            os.close(self.descriptor)


@functools.lru_cache(MOST_OPEN_FILES)
def _opened(path: Path, index: Path | None) -> OpenFile:  # noqa: ARG001  of another content there is another index
    """Return an open file; the least recently used ones are closed."""
    return OpenFile(path)


def _split(
    folder: Path,
    split: str,
    shards: RecordFiles,
    classes: tuple[str, ...],
    read: Callable[[RecordFiles, Sequence[int]], Iterator[StoredImage]],
) -> Images:
    labels = shards.rows.array[:, 3]
    return Images(
        read=functools.partial(read, shards),
        size=len(labels),
        labels=labels,
        classes=classes,
        where=f"the {split} split of {folder}",
        prefix=f"{split}/",
    )


# The files of a split --------------------------------------------------------------------------------------------------


def find_shards(folder: Path, split: str, *, key: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the files that hold a split, in order, none of a numbered set missing.

    `split` is its name, or a pattern, and `key` its key in the recipe. `suffixes` are the endings of such files (".tar"); ""
    only for those with `-of-`. Raises NoSplitError if there are none, DataError if one of a set is missing, or there is more
    than one set.
    """
    with reading(f"data.path={folder}", "correct data.path"):
        chosen = sorted(file for file in folder.glob(split) if file.is_file())
        if (folder / split).is_dir():
            found = [file for file in (folder / split).iterdir() if _is_shard(file.name, "", suffixes)]
        else:
            found = chosen or [file for file in folder.iterdir() if _is_shard(file.name, split, suffixes)]
    if not found:
        there = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
        raise NoSplitError(
            f"{folder} contains no files for {key}={split}, such as {split}{suffixes[0]} or {split}-000000{suffixes[0]}, but "
            f"{listed(there, 5) or 'nothing'}; correct data.path or {key}"
        )
    if chosen:
        remedy, pattern = "exclude their numbers from the pattern", str(folder / split)
        check_complete(chosen, f"the pattern {split}", remedy=remedy, pattern=pattern, gaps_from_0=False)
        return chosen
    sets, what = numbered_sets(found), f"{key}={split}"
    if len(found) > 1 and (len(sets) != 1 or len(sets[0].files) != len(found)):
        which = listed(sorted(file.name for file in found), 5)
        raise DataError(f"{what} could be any of {which} in {found[0].parent}; choose one with a pattern")
    check_complete(found, what, remedy="choose the shards to read with a pattern", gaps_from_0=found[0].parent == folder)
    return [file for _, file in sorted(sets[0].files.items())] if sets else found


def _is_shard(name: str, split: str, suffixes: Sequence[str]) -> bool:
    """Return True for the name of a shard of the split; of any split, if that is ""."""
    suffix = f"(?i:{'|'.join(re.escape(suffix) for suffix in suffixes if suffix)})"
    stem = rf"(?!\.)(.+[-_.])?{re.escape(split)}" if split else r"(?!\.).*?"
    forms = [rf"{stem}([-_]?\d+(-of-\d+)?)?{suffix}"]
    if "" in suffixes:
        forms.append(rf"{stem}{suffix}?-\d+-of-\d+")
    return any(re.fullmatch(form, name) for form in forms)


# The index -------------------------------------------------------------------------------------------------------------


def indexed(files: Sequence[Path], kind: str, read: Callable[[Path], Iterable[Row]]) -> RecordFiles:
    """Return the files with the index of their records, in their order.

    `read` yields the records of a file, unless there is an index already. `kind` is all that decides, in addition to the files,
    what it gives. Raises DataError if there are no records or the index cannot be kept, and what `read` raises.
    """

    def write(folder: Path) -> None:
        numbers = array("q")  # 32 bytes a record; tuples in a list would take 200
        total_bytes = sum(file.stat().st_size for file in files)
        with progress(f"indexing the samples of {files[0].parent}", total_bytes, "bytes") as advance:
            for number, file in enumerate(files):
                for row in read(file):
                    numbers.extend((number, *row))
                advance(file.stat().st_size)
        if not numbers:
            raise DataError(f"{listed(list(map(str, files)), 3)}: no samples found")
        np.save(folder / _INDEX, np.frombuffer(numbers, np.int64).reshape(-1, 4))
        sync(folder / _INDEX)

    folder = cached("indexes", [kind, *stamps(files)], write)
    return RecordFiles(tuple(files), Mapped.from_npy(folder / _INDEX))


# WebDataset ------------------------------------------------------------------------------------------------------------


def open_webdataset(_: DataRecipe, folder: Path, split: str, key: str) -> Images:
    """Open a split, as `open_containers` wants it; a sample without image or label is a DataError."""
    shards = indexed(find_shards(folder, split, key=key, suffixes=(".tar",)), "webdataset", _tar_rows)
    with tarfile.open(shards.paths[0], "r:") as tar:
        first = tar.next()
        content = tar.extractfile(first) if first and first.name == TAR_CLASSES else None
        classes = class_names(content.read(), f"{TAR_CLASSES} of {shards.paths[0]}") if content else ()
    return _split(folder, split, shards, classes, _read_tar)


def _read_tar(shards: RecordFiles, places: Sequence[int]) -> Iterator[StoredImage]:
    for place in places:
        piece, path, _ = shards.read(place, before=tarfile.BLOCKSIZE)  # the member's header names it
        member = tarfile.TarInfo.frombuf(piece[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape").name
        yield StoredImage(piece[tarfile.BLOCKSIZE :], f"{member} of {path} (sample {place})")


def _tar_rows(shard: Path) -> Iterator[Row]:
    """Yield the samples of a shard."""
    for key, group in groupby(_members(shard), lambda member: member[0]):
        members = list(group)
        images = [place for _, extension, place, _ in members if f".{extension}".lower().endswith(IMAGE_SUFFIXES)]
        labels = [label for *_, label in members if label is not None]
        if len(images) != 1 or len(labels) != 1:
            raise DataError(
                f"the sample {key} of {shard} has the members {', '.join(extension for _, extension, _, _ in members)}, but "
                f"needs exactly one image ({', '.join(IMAGE_SUFFIXES)}) and one {TAR_LABEL}; correct or remove it"
            )
        yield *images[0], labels[0]


def _members(shard: Path) -> Iterator[tuple[str, str, tuple[int, int], int | None]]:
    """Yield of each member its key, extension, offset and size in bytes, and if it holds the label, that."""
    refuse = reading(shard, "replace or decompress it", errors=(tarfile.TarError,))
    with refuse, shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while member := tar.next():
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            folder, slash, name = member.name.rpartition("/")
            key, _, extension = name.partition(".")
            if member.isreg() and extension and not member.name.startswith("__"):
                label = _tar_label(file, member, shard) if extension == TAR_LABEL else None
                yield folder + slash + key, extension, (member.offset_data, member.size), label
        # Damage after the first header is the end to tarfile; the true end is a block of zeros.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it is damaged or truncated at byte {tar.offset}")


def _tar_label(file: BinaryIO, member: tarfile.TarInfo, shard: Path) -> int:
    text = os.pread(file.fileno(), member.size, member.offset_data).strip()
    if not text.isdigit() or len(text) > 18:
        raise DataError(f"{member.name} of {shard} holds {text[:20]!r}, not a class number; correct or remove the sample")
    return int(text)


# TFRecord --------------------------------------------------------------------------------------------------------------


class Features(NamedTuple):
    """Names of the features that hold a sample, most likely first."""

    image: tuple[str, ...]
    label: tuple[str, ...]


def open_tfrecords(data: DataRecipe, folder: Path, split: str, key: str) -> Images:
    """Open a split, as `open_containers` wants it; a record whose CRC is wrong is a DataError."""
    features = Features(("image/encoded", data.image_column), ("image/class/label", data.label_column))
    files = find_shards(folder, split, key=key, suffixes=(".tfrecord", ".tfrecords", ""))
    shards = indexed(files, f"tfrecord {features}", functools.partial(_tfrecord_rows, features))
    return _split(folder, split, shards, _tfrecord_classes(folder), functools.partial(_read_tfrecords, features))


def _read_tfrecords(features: Features, shards: RecordFiles, places: Sequence[int]) -> Iterator[StoredImage]:
    for place in places:
        piece, path, start = shards.read(place, after=FOOTER.size)
        name = f"the record at byte {start - HEADER.size} of {path} (sample {place})"
        yield StoredImage(_encoded_and_label(_checked(piece, name), features, name)[0], name)


def _tfrecord_rows(features: Features, shard: Path) -> Iterator[Row]:
    with reading(shard, "replace the file"), shard.open("rb") as file:
        offset_bytes = 0
        while header := file.read(HEADER.size):
            name = f"the record at byte {offset_bytes} of {shard}"
            if len(header) < HEADER.size or HEADER.unpack(header)[1] != masked_crc(header[:8]):
                raise DataError(f"{name} is not a TFRecord (the CRC of its length is wrong); replace or decompress the file")
            size_bytes: int = HEADER.unpack(header)[0]
            example = _checked(file.read(size_bytes + FOOTER.size), name)
            yield offset_bytes + HEADER.size, size_bytes, _encoded_and_label(example, features, name)[1]
            offset_bytes = file.tell()


def _checked(piece: bytes, name: str) -> bytes:
    """Return the content of a record, given with the CRC that follows it. Raises DataError if that is of another content."""
    content, crc = piece[: -FOOTER.size], piece[-FOOTER.size :]
    if len(piece) < FOOTER.size or FOOTER.unpack(crc)[0] != masked_crc(content):
        raise DataError(f"{name} is damaged or truncated (its CRC differs); replace the file")
    return content


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C of `content`, rotated by 15 bits and shifted, as TensorFlow's lib/hash/crc32c.h has it."""
    with extra("data.source=tfrecord"):
        import google_crc32c
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _encoded_and_label(content: bytes, features: Features, name: str) -> tuple[bytes, int]:
    """Return the image file and the label in a serialized Example. Raises DataError if it holds none."""
    from google.protobuf.message import DecodeError

    try:
        found = _example_class().FromString(content).features.feature
    except DecodeError as error:
        raise DataError(f"{name} is not a tf.train.Example ({error}); replace the file") from error
    images = [found[key].bytes_list.value for key in features.image if key in found]
    labels = [found[key].int64_list.value for key in features.label if key in found]
    if not images or not labels or len(images[0]) != 1 or len(labels[0]) != 1:
        needed = f"{' or '.join(features.image)} with an image file and {' or '.join(features.label)} with an integer"
        raise DataError(
            f"{name} has the features {', '.join(sorted(found)) or 'none'}, but needs {needed}; set data.image_column and "
            "data.label_column"
        )
    return images[0][0], labels[0][0]


def _tfrecord_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes in labels.txt; none without such a file. Raises DataError for another format."""
    path = folder / "labels.txt"
    if not path.exists():
        return ()
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    lines = [line.partition(":") for line in text.split("\n") if line]
    if [number for number, _, _ in lines] != [str(number) for number in range(len(lines))]:
        raise DataError(f"{path} does not list the classes 0, 1, ... in order, as in 0:ant; correct or remove it")
    return tuple(name for _, _, name in lines)


@functools.cache
def _example_class() -> Any:
    """Return the class of the message tf.train.Example, as tensorflow/core/example/example.proto and feature.proto have it."""
    with extra("data.source=tfrecord"):
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds, one, many = descriptor_pb2.FieldDescriptorProto, {"label": 1}, {"label": 3}
    file = descriptor_pb2.FileDescriptorProto(name="samerun/example.proto", package="tensorflow", syntax="proto3")
    lists = {"bytes": kinds.TYPE_BYTES, "float": kinds.TYPE_FLOAT, "int64": kinds.TYPE_INT64}
    feature, features, example = (file.message_type.add(name=name) for name in ("Feature", "Features", "Example"))
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(lists.items(), 1):
        file.message_type.add(name=f"{name}_list").field.add(name="value", number=1, type=kind, **many)
        feature.field.add(name=f"{name}_list", number=number, type_name=f".tensorflow.{name}_list", oneof_index=0, **one)
    entry = features.nested_type.add(name="FeatureEntry", options={"map_entry": True})
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, **one)
    entry.field.add(name="value", number=2, type_name=".tensorflow.Feature", **one)
    features.field.add(name="feature", number=1, type_name=".tensorflow.Features.FeatureEntry", **many)
    example.field.add(name="features", number=1, type_name=".tensorflow.Features", **one)
    pool = descriptor_pool.DescriptorPool()  # its own: TensorFlow, where it is, has put the same into the default one
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
