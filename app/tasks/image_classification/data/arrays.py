"""Sources whose pictures have one size and are looked up, not decoded; the ones that need no library: the embedded digits.

`fetch` is one look-up for the whole batch, in memory or in a file that is mapped: 5-10 us for 128 of 60,000 images of 28x28.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from app.data.draws import HostDraws
from app.data.samples import Layout
from app.errors import DataError, RecipeError
from app.files import other_libraries
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.kept import keep, stamps
from app.tasks.image_classification.data.pictures import PictureSource
from app.tasks.image_classification.data.source import Data, Source, check_labels, facts_of
from app.tasks.image_classification.data.split import Images, Split, Unstored, open_split, pictures_in_a_chunk
from app.tasks.image_classification.data.split_names import NoSplitError, each_split, sources
from app.tasks.image_classification.sections import Sections


@dataclass(frozen=True, eq=False)
class ArraySource:
    """One split in arrays."""

    workers: ClassVar[bool] = False
    remedy: ClassVar[str] = "copy them to a local disk (data.stage_to)"
    images: Images
    labels: np.ndarray
    """Of any integer type, [N], in 0 .. len(classes) - 1."""
    classes: tuple[str, ...]
    fingerprint: str

    @property
    def channels(self) -> int:
        """Channels of each image."""
        return int(self.images.array.shape[1])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return int(self.images.array.shape[2]), int(self.images.array.shape[3])

    @property
    def facts(self) -> dict[str, Any]:
        """What a network for these pictures is built by."""
        return facts_of(self)

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of images and labels."""
        return {"images": (self.images.array.shape[1:], np.dtype(np.uint8)), "labels": ((), np.dtype(np.int64))}

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002  nothing is random
        """Return images and labels, as `Source.fetch` says."""
        memory = {name: np.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.layout.items()}
        self.fetch_into(indices, memory)
        return {name: torch.from_numpy(array) for name, array in memory.items()}

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write what `fetch` returns into `images`, uint8 [B, C, H, W], and `labels`, int64 [B]."""
        # NumPy's look-up stays in this thread: torch's waits for its pool, for a millisecond when other processes are busy.
        # All indices are legal. Unless it is told to clip those that are not, NumPy looks up into memory of its own first, to
        # leave the images alone if one is not, and takes 2.5 times as long.
        self.images.array.take(indices, axis=0, out=memory["images"], mode="clip")
        memory["labels"][:] = self.labels.take(indices)


@dataclass(frozen=True, eq=False)
class ArrayReader:
    """Reads the pictures of an array one by one, for random crops."""

    images: Images
    labels: np.ndarray

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for index in indices:
            yield torch.from_numpy(self.images.array[index].copy()), int(self.labels[index])

    def file(self, index: int) -> None:
        """Return nothing: pixels are stored."""


def open_array(split: Split, *, recipe: Sections, training: bool, where: str, made_of: Sequence[object]) -> Source:
    """Return the source of a split in arrays, checked. `where` names it in errors; `made_of` tells it from any other (`keep`).

    With `data.image_size` (and another size stored) the images are resized, once for all processes of the machine, and
    cropped at the centre: bilinear with antialiasing. Only where the recipe asks for random resized crops are they cropped
    when they are fetched. Raises DataError if a label is not that of a class, or there are no samples.
    """
    check_labels(split.labels, len(split.classes), where=where)
    framing, identity = Framing.of(recipe, training=training), split.fingerprint
    stored = split.images.array.shape
    if framing.min_area is not None:
        return PictureSource(
            read=ArrayReader(split.images, split.labels),
            size=len(split.images),
            where=where,
            classes=split.classes,
            channels=stored[1],
            image_size=framing.size_of(stored[2:]),
            framing=framing,
            fingerprint=identity,
        )
    if framing.size_of(stored[2:]) != stored[2:] or framing.resize_size is not None:
        shape = (*stored[:2], *framing.size_of(stored[2:]))
        made_from = [*made_of, identity, framing.image_size, framing.resize_size]
        split = keep(
            made_from,
            int(np.prod(shape, dtype=np.int64)),
            lambda: Unstored(shape, _resized(split, framing, shape), split.labels, split.classes),
        )
    return ArraySource(split.images, split.labels, split.classes, identity)


def _resized(split: Split, framing: Framing, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    array = split.images.array
    step = min(pictures_in_a_chunk(shape), pictures_in_a_chunk(array.shape))
    for start in range(0, len(array), step):
        yield framing.fixed(torch.from_numpy(array[start : start + step].copy())).numpy()


def open_arrays(recipe: Sections) -> Data:
    """Open what `samerun data pack --to arrays` wrote: data.path/<split>."""
    data = recipe.data
    if data.path is None:
        raise RecipeError("data.source=arrays needs data.path: the folder that `samerun data pack --to arrays` made")
    root = Path(data.path)

    def opened(name: str, _key: str) -> tuple[Path, Split]:
        if not (root / name).is_dir():
            raise NoSplitError(f"{root / name} is missing, so this is not a complete split of arrays: pack it again")
        return root / name, open_split(root / name)

    parts = each_split(data, opened)
    first, split = parts.there[0]
    for folder, other in parts.there:
        if other.classes != split.classes:
            raise DataError(f"{first} and {folder} have different classes; pack all splits in one command")

    def source(part: tuple[Path, Split], training: bool) -> Source:
        folder, own = part
        made_of = stamps(sorted(folder.iterdir()))
        return open_array(own, recipe=recipe, training=training, where=str(folder), made_of=made_of)

    return sources(parts, source)


def open_digits(recipe: Sections) -> Data:
    """Open the embedded digits (digits.md): 1 channel, 8x8 pixels, 10 classes."""
    with other_libraries.array(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    images = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)[:, None]
    in_test = np.arange(len(labels)) % 5 == 4
    classes = tuple("0123456789")
    train, test = (
        open_array(
            Split(Images(images[rows]), labels[rows].astype(np.int64), classes),
            recipe=recipe,
            training=training,
            where=f"the {name} split of the embedded digits",
            made_of=["digits", name],
        )
        for rows, training, name in ((~in_test, True, "train"), (in_test, False, "test"))
    )
    return Data(train, None, test)
