"""What all containers share: WebDataset, HDF5, LMDB and TFRecord files, read by sample number.

Sample i is the i-th record of the split, and its picture is decoded as that of an image folder is: a recipe gives the same
run over any of them. Each format opens a split as `Records`; files are opened by the process that reads them.
"""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.left_out import LeftOut, Rest, reading
from app.tasks.image_classification.data.pictures import PictureSource, decode
from app.tasks.image_classification.data.rows import numbers_up_to
from app.tasks.image_classification.data.source import Data, Source, check_labels, fingerprint
from app.tasks.image_classification.data.split_names import each_split, sources
from app.tasks.image_classification.sections import Sections

H = TypeVar("H", bound="Handle")
# Fewer than the 1,024 files that a process may usually have open, which is also how many shards ImageNet has as TFRecord.
MOST_OPEN_FILES = 128


class Records(Protocol):
    """The records of one split; may be pickled, or forked into workers."""

    @property
    def where(self) -> str:
        """The split and where it is, as errors name it."""

    @property
    def labels(self) -> np.ndarray:
        """int64 [N], unchecked."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Name of each class; None if the container does not say."""

    @property
    def encoded(self) -> bool:
        """Whether the records hold picture files; pixels otherwise."""

    def picture(self, index: int, channels: int) -> Tensor:
        """Return a picture, uint8 [C, H, W]; `channels` are those that picture files are decoded to. Raises DataError."""

    def content(self, index: int) -> bytes:
        """Return what the fingerprint covers of a record: its picture's file, or its pixels. Raises DataError."""


@dataclass(frozen=True, eq=False)
class RecordReader:
    """Reads pictures and labels as `PictureSource` asks for them."""

    records: Records
    channels: int
    split: str
    rest: Rest
    """Which of the records are samples."""
    labels: np.ndarray
    """Those of the samples, int64 [N]."""

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for index in indices:
            yield self.picture(index), int(self.labels[index])

    def picture(self, index: int) -> Tensor:
        """Return a picture, uint8 [C, H, W]. Raises DataError."""
        return self.records.picture(self.rest.place(index), self.channels)

    def content(self, index: int) -> bytes:
        """Return what the fingerprint covers of a picture. Raises DataError."""
        return self.records.content(self.rest.place(index))

    def name(self, index: int) -> str:
        """Return how `data.leave_out` names a sample."""
        return f"{self.split}/{self.rest.place(index)}"

    def file(self, index: int) -> bytes | None:
        """Return the picture's file as it is stored; nothing of one that stores pixels. Raises DataError."""
        return self.content(index) if self.records.encoded else None


def open_records(recipe: Sections, open_split: Callable[[Path, str, str], Records]) -> Data:
    """Open the splits; `open_split` makes records of data.path, the name of a split, and the recipe's key that says it.

    Picture files become RGB, or grayscale with data.color=gray; without data.image_size all must have the size of the first.
    """
    data = recipe.data
    if data.path is None:
        raise RecipeError(f"data.source={data.source} needs data.path: the folder with the files of all splits")
    folder, left_out = Path(data.path), LeftOut(data)

    def opened(split: str, key: str) -> RecordReader:
        records = open_split(folder, split, key)
        rest = left_out.numbered(split, len(records.labels))
        return RecordReader(records, 1 if data.color == "gray" else 3, split, rest, rest.of(records.labels))

    readers = each_split(data, opened)
    left_out.check_found()
    classes = _classes(readers.there)
    for reader in readers.there:
        check_labels(reader.labels, len(classes), where=reader.records.where, number=reader.rest.place)
    first = reading(readers.there[0].picture, readers.there[0].name)(0)

    def source(reader: RecordReader, training: bool) -> Source:
        return _source(reader, classes, first, Framing.of(recipe, training=training))

    return sources(readers, source)


def _source(reader: RecordReader, classes: tuple[str, ...], first: Tensor, framing: Framing) -> Source:
    """Return the source of a split; `first` is the first picture, uint8 [C, H, W]."""
    return PictureSource(
        read=reader,
        size=len(reader.labels),
        where=reader.records.where,
        classes=classes,
        channels=first.shape[0],
        image_size=framing.size_of((first.shape[1], first.shape[2])),
        framing=framing,
        fingerprint=fingerprint(classes, len(reader.labels), reading(reader.content, reader.name), listing=[reader.labels]),
    )


def _classes(readers: Sequence[RecordReader]) -> tuple[str, ...]:
    """Return the classes' names: those that the containers hold, else 0 up to the largest label of the first, for training."""
    named = [(records.classes, records.where) for records in (reader.records for reader in readers) if records.classes]
    for (names, where), (other, there) in pairwise(named):
        if names != other:
            raise DataError(
                f"two splits have different classes: {len(names)} ({listed(names, 5)}) in {where}, "
                f"{len(other)} ({listed(other, 5)}) in {there}; write both with the same classes"
            )
    return named[0][0] if named else tuple(numbers_up_to(int(readers[0].labels.max(initial=0)), readers[0].records.where))


def class_names(content: bytes, where: str) -> tuple[str, ...]:
    """Return the names in a JSON list. Raises DataError if it is something else."""
    try:
        names = json.loads(content)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {content[:40]!r}, not a JSON list of class names; write it again")
    return tuple(names)


def decoded(content: bytes, channels: int, *, name: str) -> Tensor:
    """Return the picture in the content of an image file, as `decode` does."""
    return decode(io.BytesIO(content), channels=channels, name=name)


class Handle(Protocol):
    """A library's handle on a file."""

    def close(self) -> None:
        """Let go of the file."""


class OwnHandle(Generic[H]):
    """A file that a library opens, when it is first used in a process.

    Its handle is used in no other process, as LMDB demands: after a fork, or pickled, the file is opened again.
    """

    def __init__(self, opening: Callable[[Path], H], path: Path) -> None:
        self.path = path
        self._opening = opening
        self._own: tuple[int, H] | None = None
        """The process that opened the file, and the handle."""

    def __call__(self) -> H:
        """Return the handle. Raises what `opening` does."""
        if self._own is None or self._own[0] != os.getpid():
            self.close()
            self._own = os.getpid(), self._opening(self.path)
        return self._own[1]

    def close(self) -> None:
        """Let go of the file until it is used again."""
        if self._own is not None:
            (_, handle), self._own = self._own, None
            handle.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": None}


class Files:
    """Files that are read in pieces, opened when needed; those that were not used for longest are closed.

    A fork may share them, because a piece is read at its place and not where the file was left.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, number: int, offset_bytes: int, size_bytes: int) -> bytes:
        """Return a piece of the file with this number. Raises DataError if it cannot be read, or the file is shorter."""
        try:
            piece = os.pread(self._descriptor(number), size_bytes, offset_bytes)
        except OSError as error:
            raise DataError(f"{self.paths[number]} cannot be read ({error.strerror}); replace the file") from error
        if len(piece) < size_bytes:
            raise DataError(
                f"{self.paths[number]} is truncated: it ends before byte {offset_bytes + size_bytes}; replace the file"
            )
        return piece

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            if len(self._open) >= MOST_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[number] = os.open(self.paths[number], os.O_RDONLY)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
