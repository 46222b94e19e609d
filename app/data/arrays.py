"""Sources that live in memory as one array, and the ones among them that need no library: the embedded digits.

`fetch` is one look-up for the whole batch: 5-10 us for 128 of 60,000 images of 28x28.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from app.data.framing import Framing
from app.data.pictures import PictureSource
from app.data.source import Source, check_labels, fingerprint
from app.recipe import Recipe

# Images resized in one go: bounds the memory that resizing needs beside its result.
RESIZE_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class ArraySource:
    """One split held in memory."""

    decodes: ClassVar[bool] = False
    images: np.ndarray
    """uint8 [N, C, H, W]."""
    labels: np.ndarray
    """int64 [N], in 0 .. len(classes) - 1."""
    classes: tuple[str, ...]
    fingerprint: str

    @property
    def channels(self) -> int:
        """Channels of each image."""
        return int(self.images.shape[1])

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return int(self.images.shape[2]), int(self.images.shape[3])

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: np.ndarray, samples: np.ndarray) -> tuple[Tensor, Tensor]:  # noqa: ARG002  nothing is random
        """Return images and labels, as `Source.fetch` says."""
        # NumPy's look-up stays in this thread: torch's waits for its pool, for a millisecond when other processes are busy.
        return torch.from_numpy(self.images[indices]), torch.from_numpy(self.labels[indices])


@dataclass(frozen=True, eq=False)
class ArrayReader:
    """Reads the pictures of an array one by one, for random crops."""

    images: np.ndarray
    labels: np.ndarray

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for index in indices:
            yield torch.from_numpy(self.images[index]), int(self.labels[index])


def open_array(
    images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], *, recipe: Recipe, training: bool, origin: str
) -> Source:
    """Return the source of an array, checked.

    With `data.image_size` (and another size stored) the images are resized here, once, and cropped at the centre: bilinear
    with antialiasing. Only where the recipe asks for random resized crops are they cropped when they are fetched.

    Args:
        images: uint8 [N, C, H, W].
        labels: Int [N].
        classes: Name of each class.
        recipe: What is learnt.
        training: Whether this is the training split.
        origin: Where the data came from, as errors name it.

    Raises:
        DataError: A label is not that of a class, or there are no samples.
    """
    where = f"the {'train' if training else 'test'} split of {origin}"
    check_labels(labels, len(classes), where=where)
    shape = str(images.shape).encode()
    targets = labels.astype(np.int64)
    identity = fingerprint(classes, len(images), lambda index: shape + images[index].tobytes(), listing=targets.tobytes())
    framing = Framing.of(recipe, training=training)
    if framing.min_area is not None:
        return PictureSource(
            read=ArrayReader(images, targets),
            size=len(images),
            where=where,
            classes=classes,
            channels=images.shape[1],
            image_size=framing.size_of(images.shape[2:]),
            framing=framing,
            fingerprint=identity,
        )
    if framing.image_size is not None:
        chunks = torch.from_numpy(images).split(RESIZE_CHUNK)
        images = torch.cat([framing.fixed(chunk) for chunk in chunks]).numpy()
    return ArraySource(images, targets, classes, identity)


def open_digits(recipe: Recipe) -> tuple[Source, Source]:
    """Return the training and the test split of the embedded digits (digits.md): 1 channel, 8x8 pixels, 10 classes."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    images = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)[:, None]
    in_test = np.arange(len(labels)) % 5 == 4
    classes = tuple("0123456789")
    train, test = (
        open_array(images[rows], labels[rows], classes, recipe=recipe, training=training, origin="the embedded digits")
        for rows, training in ((~in_test, True), (in_test, False))
    )
    return train, test
