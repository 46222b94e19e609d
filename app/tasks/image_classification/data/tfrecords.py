"""TFRecord files of `tf.train.Example`s, without TensorFlow.

https://www.tensorflow.org/tutorials/load_data/tfrecord: a record is its length, a masked CRC-32C of that, the content and a
masked CRC-32C of that. Both are checked when the index is made, for which all is read once, and the content's whenever a
record is read. An Example has the features of ImageNet's files, `image/encoded` and `image/class/label`, or those that
data.image_column and data.label_column name, as the files of TensorFlow Datasets do (`image`, `label`). Names of the classes
are in `labels.txt` beside the files (`0:ant`), where TF-Slim keeps them.

Google's protobuf library, there with TensorBoard, parses the Examples in C, from a description of the message made here. The
package `tfrecord` reads streams only and checks no CRC.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from app.errors import DataError
from app.files.other_libraries import extra
from app.tasks.image_classification.data.containers import Files, decoded, open_records
from app.tasks.image_classification.data.index import Index, Row, indexed
from app.tasks.image_classification.data.shard_files import find_shards
from app.tasks.image_classification.data.source import Data
from app.tasks.image_classification.sections import Sections

IMAGE, LABEL = "image/encoded", "image/class/label"
CLASSES = "labels.txt"
SUFFIXES = (".tfrecord", ".tfrecords", "")
HEADER = struct.Struct("<QI")
"""Of a record: its length in bytes, and the masked CRC of these 8 bytes."""
FOOTER = struct.Struct("<I")
"""Of a record: the masked CRC of its content."""


class Features(NamedTuple):
    """Names of the features that hold a sample, most likely first."""

    image: tuple[str, ...]
    label: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ExampleRecords:
    """The records of a split, in the order of the files."""

    encoded: ClassVar[bool] = True
    where: str
    classes: tuple[str, ...] | None
    index: Index
    shards: Files
    features: Features

    @property
    def labels(self) -> np.ndarray:
        """int64 [N]."""
        return self.index.labels

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, as `Records` says."""
        return decoded(self.content(index), channels, name=self._name(index))

    def content(self, index: int) -> bytes:
        """Return a picture's file, as `Records` says."""
        number, offset_bytes, size_bytes, _ = self.index.rows[index].tolist()
        piece = self.shards.read(number, offset_bytes, size_bytes + FOOTER.size)
        return encoded_and_label(checked(piece, self._name(index)), self.features, self._name(index))[0]

    def _name(self, index: int) -> str:
        number, offset_bytes, _, _ = self.index.rows[index].tolist()
        return f"the record at byte {offset_bytes - HEADER.size} of {self.shards.paths[number]} (sample {index})"


def open_tfrecords(recipe: Sections) -> Data:
    """Return the splits, as `open_records` does; a record whose CRC is wrong is a DataError."""
    features = Features((IMAGE, recipe.data.image_column), (LABEL, recipe.data.label_column))
    return open_records(recipe, functools.partial(_open_split, features))


def _open_split(features: Features, folder: Path, split: str, key: str) -> ExampleRecords:
    shards = find_shards(folder, split, key=key, suffixes=SUFFIXES)
    index = indexed(shards, f"tfrecord {features}", functools.partial(_rows, features))
    return ExampleRecords(f"the {split} split of {folder}", read_classes(folder), index, Files(shards), features)


def _rows(features: Features, shard: Path) -> Iterator[Row]:
    try:
        with shard.open("rb") as file:
            offset_bytes = 0
            while header := file.read(HEADER.size):
                name = f"the record at byte {offset_bytes} of {shard}"
                if len(header) < HEADER.size or HEADER.unpack(header)[1] != masked_crc(header[:8]):
                    raise DataError(
                        f"{name} is not a TFRecord (the CRC of its length is wrong); replace or decompress the file"
                    )
                size_bytes: int = HEADER.unpack(header)[0]
                example = checked(file.read(size_bytes + FOOTER.size), name)
                yield offset_bytes + HEADER.size, size_bytes, encoded_and_label(example, features, name)[1]
                offset_bytes = file.tell()
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror}); replace the file") from error


def checked(piece: bytes, name: str) -> bytes:
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


def encoded_and_label(content: bytes, features: Features, name: str) -> tuple[bytes, int]:
    """Return the picture's file and the label in a serialized Example. Raises DataError if it holds none."""
    from google.protobuf.message import DecodeError

    try:
        found = example_class().FromString(content).features.feature
    except DecodeError as error:
        raise DataError(f"{name} is not a tf.train.Example ({error}); replace the file") from error
    images = [found[key].bytes_list.value for key in features.image if key in found]
    labels = [found[key].int64_list.value for key in features.label if key in found]
    if not images or not labels or len(images[0]) != 1 or len(labels[0]) != 1:
        raise DataError(
            f"{name} has the features {', '.join(sorted(found)) or 'none'}, but needs "
            f"{' or '.join(features.image)} with an encoded picture and {' or '.join(features.label)} with an "
            "integer; set data.image_column and data.label_column"
        )
    return images[0][0], labels[0][0]


def read_classes(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the classes in labels.txt; None without such a file. Raises DataError if it is not as it must be."""
    path = folder / CLASSES
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); repair or remove it") from error
    lines = [line.partition(":") for line in text.split("\n") if line]
    if [number for number, _, _ in lines] != [str(number) for number in range(len(lines))]:
        raise DataError(f"{path} does not list the classes 0, 1, ... in order, as in 0:ant; correct or remove it")
    return tuple(name for _, _, name in lines)


@functools.cache
def example_class() -> Any:
    """Return the class of the message tf.train.Example."""
    with extra("data.source=tfrecord"):
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()  # one of its own: TensorFlow, where it is, has put the same into the default one
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


# tensorflow/core/example/example.proto and feature.proto, as descriptor.proto writes them.
_EXAMPLE = """
name: "samerun/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".tensorflow.BytesList" label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: ".tensorflow.FloatList" label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: ".tensorflow.Int64List" label: LABEL_OPTIONAL oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type_name: ".tensorflow.Feature" label: LABEL_OPTIONAL }
  }
  field { name: "feature" number: 1 type_name: ".tensorflow.Features.FeatureEntry" label: LABEL_REPEATED }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: ".tensorflow.Features" label: LABEL_OPTIONAL } }
"""
