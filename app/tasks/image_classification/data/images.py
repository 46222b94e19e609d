"""`Images`, the samples of a split in any format, without the samples that `data.leave_out` names.

A format supplies how stored samples are read, their labels and the names of the classes. Splits, leaving samples out,
decoding, cropping, checks and the fingerprint are the same for all and are here. `open.py` opens what a recipe names.

train/cat/0007.jpg      a line names an image of an image folder by its path below data.path,
    train/12                and a sample of any other kind by its split and its number from 0
    # what is wrong         lines that begin with "# ", and empty ones, are skipped

The samples after one that is left out have other numbers, as if it had never been stored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from app.data.data_files import reading
from app.data.draws import HostDraws
from app.data.samples import CHECK
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.files import text_files
from app.tasks.image_classification.data.decoding import Framing, decode, pixels_of
from app.tasks.image_classification.sections import DataRecipe, Sections

T = TypeVar("T")
FINGERPRINT_SAMPLES = 64
"""Samples whose contents a fingerprint covers: few enough to read from a cold network disk in about a second."""
FINGERPRINT_BYTES = 1 << 16
"""Bytes of a file in an image folder that the fingerprint covers, in addition to the file's size."""
DOWNLOADS = "data"
"""The folder of downloads, unless data.path is another."""
MOST_CLASSES = 1 << 20
"""Integer labels from this on are taken for something else (identifiers, for example), not for classes."""


VALIDATION_NAMES, TEST_NAMES = ("val", "valid", "validation"), ("test",)
"""Names of splits that are used without being named in the recipe."""


class NoSplitError(DataError):
    """A split does not exist."""


class UnreadableError(DataError):
    """A sample cannot be read that is needed to open its split; `name` is its name in `data.leave_out`."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


class StoredImage(NamedTuple):
    """A sample as its format stores it."""

    value: bytes | np.ndarray | Tensor
    """Content of an image file; or pixels, in an array (see `pixels_of`) or a tensor uint8 [C, H, W]."""
    name: str
    """The sample's name in errors."""
    label: int | None = None
    """The label of made-up data, whose labels are not stored."""

    def image(self, channels: int) -> Tensor:
        """Return the image, uint8 [C, H, W]. Image files are decoded to `channels`; pixels keep theirs. Raises DataError."""
        if isinstance(self.value, bytes):
            return decode(self.value, channels=channels, name=self.name)
        return self.value if isinstance(self.value, Tensor) else pixels_of(self.value, name=self.name)

    def content(self) -> bytes:
        """Return what the fingerprint covers: the file, or shape and pixels."""
        if isinstance(self.value, bytes):
            return self.value
        return str(tuple(self.value.shape)).encode() + np.asarray(self.value).tobytes()

    def head(self) -> bytes:
        """Return what the fingerprint covers of a file in an image folder."""
        assert isinstance(self.value, bytes)
        return b"%d:%b" % (len(self.value), self.value[:FINGERPRINT_BYTES])


AS_STORED = Framing()


@dataclass(frozen=True, eq=False, kw_only=True)
class Images:
    """One split: `Samples` whose batches are uint8 images, not normalized, and labels. May be pickled, or forked into workers.

    The fields up to `made_of` are what a format supplies; the others are set by `completed`.
    """

    workers: ClassVar[bool] = True
    is_array: ClassVar[bool] = False
    read: Callable[[Sequence[int]], Iterable[StoredImage]]
    """Reads samples by their places among all stored ones. Raises DataError, naming the sample."""
    size: int
    """Number of samples."""
    labels: np.ndarray | None
    """Labels of the samples, integers [N]; None if each is computed with its image."""
    classes: tuple[str, ...] = ()
    """Name of each class, by label; empty until `completed` if the format stores no names."""
    where: str
    """The split and its source, in errors."""
    prefix: str = ""
    """Prefix of the name of a sample in `data.leave_out`."""
    files: np.ndarray | None = None
    """Path of each stored file below `where`, bytes [M]; None: samples are named by their numbers."""
    not_read: tuple[str, ...] = ()
    """A sentence for each folder with something that is not read."""
    made_of: tuple[Any, ...] | None = None
    """Files of the images (`stamps`), if they may be decoded once and kept in the cache."""
    places: np.ndarray | None = None
    """Indices of the samples among all stored ones, int64 [N]; None: all."""
    channels: int = 0
    image_size: tuple[int, int] = (0, 0)
    """Height and width in pixels of each image that `fetch` returns."""
    framing: Framing = AS_STORED
    fingerprint: str = ""
    """The same for the same data on every machine; the function `fingerprint` describes what it covers."""

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters needed to build a network for these images, as JSON has them."""
        return {"classes": list(self.classes), "channels": self.channels, "image_size": list(self.image_size)}

    def __len__(self) -> int:
        return self.size

    def name(self, index: int) -> str:
        """Return the name of a sample in `data.leave_out`."""
        place = self._places([index])[0]
        return self.prefix + (str(place) if self.files is None else os.fsdecode(self.files[place]))

    def stored(self, index: int) -> StoredImage:
        """Return a sample as it is stored. Raises DataError."""
        return next(iter(self.read(self._places([index]))))

    def _places(self, indices: Sequence[int]) -> Sequence[int]:
        if self.places is None:
            return indices
        places: list[int] = self.places[np.asarray(indices)].tolist()
        return places

    def images(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield images, uint8 [C, H, W] of the sizes that they are stored in, and their labels. Raises DataError."""
        for index, stored in zip(indices, self.read(self._places(indices)), strict=True):
            label = stored.label if self.labels is None else self.labels[index]
            yield stored.image(self.channels), int(label)  # type: ignore[arg-type]

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return `images`, uint8 [B, C, H, W], and `labels`, int64 [B]; without draws, the images' centers."""
        images = torch.empty(len(indices), self.channels, *self.image_size, dtype=torch.uint8)
        labels = torch.empty(len(indices), dtype=torch.int64)
        for row, (stored, label) in enumerate(self.images(indices.tolist())):
            image = self.framing.random(stored, draw.of(row) if draw else None)
            if image.shape != images.shape[1:]:
                (channels, height, width), (expected_height, expected_width) = image.shape, self.image_size
                raise DataError(
                    f"sample {indices[row]} of {self.where} is {width}x{height} pixels with {channels} channel(s), but the "
                    f"first training sample is {expected_width}x{expected_height} with {self.channels}; set data.image_size, "
                    "which resizes all images, or store all images in the same way"
                )
            images[row], labels[row] = image, label
        return {"images": images, "labels": labels}

    def required(self, index: int, use: Callable[[StoredImage], T]) -> T:
        """Return what `use` makes of a sample that is needed to open the split. Raises UnreadableError if it cannot be read."""
        try:
            return use(self.stored(index))
        except DataError as error:
            raise UnreadableError(f"{error}. {CHECK}", self.name(index)) from error


Data = dict[str, Images]
"""The splits that exist, by name: "train", "validation", "test", in this order."""


def each_split(data: DataRecipe, open_split: Callable[[str, str], T]) -> dict[str, T]:
    """Open the splits that a recipe names, and those that exist under a usual name.

    `open_split` takes a name and its key in the recipe, and raises NoSplitError for a split that does not exist. A validation
    or test split that the recipe names must exist; the training split may be missing if there is another one.
    """
    named = {"train": data.train_split, "validation": data.validation_split, "test": data.test_split}
    usual = {"train": (), "validation": VALIDATION_NAMES, "test": TEST_NAMES}
    found: dict[str, T] = {}
    missing: NoSplitError | None = None
    for split, name in named.items():
        for candidate in (name,) if name is not None else usual[split]:
            if split in found or (name is None and candidate in named.values()):
                continue
            try:
                found[split] = open_split(candidate, f"data.{split}_split")
            except NoSplitError as error:
                if name is not None and split != "train":
                    raise
                missing = missing or error
    if not found and missing is not None:
        raise missing
    return found


def data_path(recipe: Sections) -> Path:
    """Return data.path. Raises RecipeError if it is not set."""
    if recipe.data.path is None:
        or_name = ", or the name of a data set on the hub" if recipe.data.source == "huggingface" else ""
        raise RecipeError(f"data.source={recipe.data.source} needs data.path: the file or folder with all splits{or_name}")
    return Path(recipe.data.path)


def completed(
    splits: Data, recipe: Sections, *, classes: Sequence[str], channels: int, listing: Sequence[np.ndarray] = ()
) -> Data:
    """Return splits whose images have the shape of the first one, unless the recipe has an image size; labels are checked.

    Image files are decoded to `channels`. The fingerprint of a split covers the labels, `listing`, and the paths of files.
    Raises DataError.
    """
    for images in splits.values():
        assert images.labels is not None
        check_labels(images.labels, len(classes), where=images.where, places=images.places)
    first, side = next(iter(splits.values())), recipe.data.image_size
    shape: Sequence[int]
    if first.files is not None and side is not None:  # the files of a folder have any size, and none is decoded here
        shape = (channels, side, side)
    else:
        shape = first.required(0, lambda stored: stored.image(channels)).shape
    done = {}
    for split, images in splits.items():
        content = StoredImage.content
        parts: list[np.ndarray | memoryview] = [np.asarray(images.labels), *listing]
        if images.files is not None:
            content = StoredImage.head
            files = images.files if images.places is None else images.files[images.places]
            parts.append(memoryview(b"\0".join(files.tolist())))
        read = functools.partial(images.required, use=content)
        framing = Framing.of(recipe, training=split == "train")
        done[split] = replace(
            images,
            classes=tuple(classes),
            channels=shape[0],
            image_size=framing.size_of((shape[1], shape[2])),
            framing=framing,
            fingerprint=fingerprint(classes, len(images), read, listing=parts),
        )
    return done


def open_containers(open_split: Callable[[DataRecipe, Path, str, str], Images], recipe: Sections) -> Data:
    """Open the splits of a format that stores labels; `open_split` takes data, data.path, name of a split and its key.

    Image files become RGB, or grayscale with data.color=gray; without data.image_size all must have the size of the first.
    """
    data, folder = recipe.data, data_path(recipe)
    splits = without_left_out(each_split(data, lambda split, key: open_split(data, folder, split, key)), data)
    first = next(iter(splits.values()))
    named = {images.where: images.classes for images in splits.values() if images.classes}
    largest = 0 if first.labels is None else int(first.labels.max(initial=0))
    classes = same_classes(named) if named else numbers_up_to(largest, first.where)
    return completed(splits, recipe, classes=classes, channels=1 if data.color == "gray" else 3)


def check_labels(labels: np.ndarray, num_classes: int, *, where: str, places: np.ndarray | None = None) -> None:
    """Check that there are samples and that all labels (int [N]) are in 0 .. num_classes - 1.

    Raises DataError with `where` ("the train split of ...") and the first offending sample, by its place among the stored ones.
    """
    if labels.size == 0:
        raise DataError(f"{where} has no samples")
    if labels.min() >= 0 and labels.max() < num_classes:
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    index = int(wrong[0])
    problem = f"sample {index if places is None else places[index]} of {where} has label {int(labels[index])}"
    raise DataError(
        f"{problem}, but labels must be in 0..{num_classes - 1} ({wrong.size} of {labels.size} are not); correct the labels, "
        "or remove these samples"
    )


def same_classes(classes: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return the class names of all splits, given by their names in errors. Raises DataError if they differ."""
    (first, names), *others = classes.items()
    for where, other in others:
        if list(other) != list(names):
            sides = {first: {*map(repr, names)} - {*map(repr, other)}, where: {*map(repr, other)} - {*map(repr, names)}}
            only = "; ".join(f"{listed(sorted(side), 5)} only in {place}" for place, side in sides.items() if side)
            only = only or f"their order differs between {first} and {where}"
            raise DataError(f"two splits have different classes: {only}; give both the same")
    return names


def numbers_up_to(highest: int, where: str) -> list[str]:
    """Return names for classes without names: 0 up to the largest label. Raises DataError if that cannot be a label."""
    if highest >= MOST_CLASSES:
        raise DataError(f"{where} holds {highest}; labels must be 0 to the number of classes - 1")
    return [str(label) for label in range(highest + 1)]


def class_names(content: bytes, where: str) -> tuple[str, ...]:
    """Return the names in a JSON list. Raises DataError if it is something else."""
    try:
        names = json.loads(content)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where} is {content[:40]!r}, not a JSON list of class names; write it again")
    return tuple(names)


def fingerprint(
    classes: Sequence[str],
    size: int,
    content: Callable[[int], bytes],
    *,
    listing: Sequence[np.ndarray | memoryview] = (),
    samples: int = FINGERPRINT_SAMPLES,
) -> str:
    """Return a SHA-256, in hexadecimal, that tells two data sets apart without reading all of them.

    It covers the class names, the number of samples, the `content` of `samples` samples spread evenly from the first to the
    last, and `listing`: what is known of every sample, as all labels in an array, or all relative paths as bytes. It does not
    see a change of one image between those. Dates and absolute paths take no part.
    """
    digest = hashlib.sha256()

    def cover(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    cover(json.dumps([size, *classes]).encode())
    digest.update(sum(8 * part.size if isinstance(part, np.ndarray) else len(part) for part in listing).to_bytes(8, "little"))
    for part in listing:
        digest.update(np.ascontiguousarray(part, np.int64).data if isinstance(part, np.ndarray) else part)
    for index in spread(size, samples):
        cover(content(index))
    return digest.hexdigest()


def spread(size: int, count: int = FINGERPRINT_SAMPLES) -> list[int]:
    """Return up to `count` different indices spread evenly over 0 .. size - 1, both ends included."""
    count = min(size, count)
    return [index * (size - 1) // max(1, count - 1) for index in range(count)]


def without_left_out(splits: Data, data: DataRecipe) -> Data:
    """Return the splits without the samples that a recipe leaves out.

    Raises DataError if the file cannot be read or a name is in no split, RecipeError for a variable that is not set.
    """
    wanted = names_in(data)
    missing = set(wanted)
    if not wanted:
        return splits

    def rest(images: Images) -> Images:
        names = [images.name(place) for place in range(len(images))]
        missing.difference_update(names)
        places = np.array([place for place, name in enumerate(names) if name not in wanted], np.int64)
        labels = None if images.labels is None else images.labels[places]
        return replace(images, places=places, labels=labels, size=len(places))

    splits = {split: rest(images) for split, images in splits.items()}
    if missing:
        raise DataError(
            f"data.leave_out={data.leave_out} lists {listed(sorted(missing), 5)}, and data.path={data.path} has no such "
            "samples in this recipe's splits: correct the names, or write the file again with `samerun data check --write`"
        )
    return splits


def names_in(data: DataRecipe) -> frozenset[str]:
    """Return the names in the file of a recipe; none without one. Raises as `without_left_out`."""
    if data.leave_out is None:
        return frozenset()
    file = Path(text_files.filled_in("data.leave_out", data.leave_out))
    with reading(f"data.leave_out={data.leave_out}", "correct the path, or write the file with `samerun data check --write`"):
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").replace("\r\n", "\n").split("\n")
    return frozenset(line for line in lines if line.strip() and not line.startswith("# "))


def digest(data: DataRecipe) -> dict[str, str]:
    """Return a hash of what is left out, by the name of its key, whatever the file is called; nothing without a file."""
    if data.leave_out is None:
        return {}
    names = "\n".join(sorted(names_in(data))).encode("utf-8", "surrogateescape")
    return {"data.leave_out": hashlib.sha256(names).hexdigest()[:16]}


def as_text(found: Iterable[tuple[str, str]]) -> str:
    """Return the content of such a file: names, and what is wrong with each, or nothing."""
    lines = [f"# {why.splitlines()[0]}\n{name}\n" if why else f"{name}\n" for name, why in found]
    return "# samples to leave out: set data.leave_out of a recipe to this file\n" + "".join(lines)
