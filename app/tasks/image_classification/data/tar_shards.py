"""WebDataset: tar files in which the members of a sample follow one another, `KEY.jpg` and `KEY.cls`.

https://github.com/webdataset/webdataset. The key ends at the first dot of a member's name; `cls` holds the label in digits;
other members are passed over. Names of the classes, of which WebDataset says nothing, are a JSON list in the member
`__classes__` that begins each shard written here: its readers skip members with such names.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from app.errors import DataError
from app.tasks.image_classification.data.containers import Files, class_names, decoded, open_records
from app.tasks.image_classification.data.index import Index, Row, indexed
from app.tasks.image_classification.data.shard_files import find_shards
from app.tasks.image_classification.data.source import Data, first_line
from app.tasks.image_classification.sections import Sections

CLASSES = "__classes__"
LABEL = "cls"
PICTURES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")
"""Suffixes of pictures, as in torchvision's ImageFolder."""


@dataclass(frozen=True, eq=False)
class TarRecords:
    """The records of a split, in the order of the shards."""

    encoded: ClassVar[bool] = True
    where: str
    classes: tuple[str, ...] | None
    index: Index
    shards: Files

    @property
    def labels(self) -> np.ndarray:
        """int64 [N]."""
        return self.index.labels

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, as `Records` says."""
        number, offset_bytes, size_bytes, _ = self.index.rows[index].tolist()
        # The member's header, read along, names it.
        piece = self.shards.read(number, offset_bytes - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE + size_bytes)
        header, content = piece[: tarfile.BLOCKSIZE], piece[tarfile.BLOCKSIZE :]
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
        return decoded(content, channels, name=f"{member} of {self.shards.paths[number]} (sample {index})")

    def content(self, index: int) -> bytes:
        """Return a picture's file, as `Records` says."""
        number, offset_bytes, size_bytes, _ = self.index.rows[index].tolist()
        return self.shards.read(number, offset_bytes, size_bytes)


class _Member(NamedTuple):
    """A file of a sample."""

    key: str
    extension: str
    offset_bytes: int
    size_bytes: int
    label: int | None
    """What a member that holds the label says."""


def open_tar_shards(recipe: Sections) -> Data:
    """Return the splits, as `open_records` does; a sample without picture or label is a DataError."""
    return open_records(recipe, _open_split)


def _open_split(folder: Path, split: str, key: str) -> TarRecords:
    shards = find_shards(folder, split, key=key, suffixes=(".tar",))
    index = indexed(shards, "webdataset", _rows)
    return TarRecords(f"the {split} split of {folder}", _classes(shards[0]), index, Files(shards))


def _classes(shard: Path) -> tuple[str, ...] | None:
    with tarfile.open(shard, "r:") as tar:
        first = tar.next()
        content = tar.extractfile(first) if first and first.name == CLASSES else None
        return None if content is None else class_names(content.read(), f"{CLASSES} of {shard}")


def _rows(shard: Path) -> Iterator[Row]:
    """Yield the samples of a shard."""
    for key, group in groupby(_members(shard), attrgetter("key")):
        members = list(group)
        pictures = [member for member in members if member.extension.rpartition(".")[2].lower() in PICTURES]
        labels = [member.label for member in members if member.label is not None]
        if len(pictures) != 1 or len(labels) != 1:
            raise DataError(
                f"the sample {key} of {shard} has the members "
                f"{', '.join(member.extension for member in members)}, but needs exactly one picture "
                f"({', '.join(PICTURES)}) and one {LABEL}; correct or remove it"
            )
        yield pictures[0].offset_bytes, pictures[0].size_bytes, labels[0]


def _members(shard: Path) -> Iterator[_Member]:
    try:
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                key, extension = _key_and_extension(member.name)
                if member.isreg() and extension and not member.name.startswith("__"):
                    label = _label(file, member, shard) if extension == LABEL else None
                    yield _Member(key, extension, member.offset_data, member.size, label)
            # Damage after the first header is the end to tarfile; the true end is a block of zeros.
            if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"it is damaged or truncated at byte {tar.offset}")
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{shard} cannot be read as a tar file ({first_line(error)}); replace it, or unpack it if it is compressed"
        ) from error


def _key_and_extension(name: str) -> tuple[str, str]:
    """Return a member's name in two: the key, and what follows the first dot after the last slash."""
    folder, slash, file = name.rpartition("/")
    key, _, extension = file.partition(".")
    return folder + slash + key, extension


def _label(file: BinaryIO, member: tarfile.TarInfo, shard: Path) -> int:
    text = os.pread(file.fileno(), member.size, member.offset_data).strip()
    if not text.isdigit() or len(text) > 18:
        raise DataError(f"{member.name} of {shard} holds {text[:20]!r}, not a class number; correct or remove the sample")
    return int(text)
