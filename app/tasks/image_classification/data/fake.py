"""Made-up images of any size, for measuring speed without data: the images and labels of torchvision's FakeData.

They are computed here, not by torchvision, for two reasons. Its `__getitem__` seeds torch's global generators, and puts
back only the CPU's: on a GPU, dropout would repeat itself with every sample. And it casts negative floats to uint8, which
C++ leaves open; here they wrap around on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.errors import RecipeError
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.pictures import PictureSource
from app.tasks.image_classification.data.source import Data, Source, fingerprint
from app.tasks.image_classification.sections import Sections

# Images that the fingerprint makes: fewer than of stored data, because each is computed.
FINGERPRINT_SAMPLES = 8


@dataclass(frozen=True)
class FakeReader:
    """Makes the pictures of one split, each from its index alone."""

    shape: tuple[int, int, int]
    num_classes: int
    offset: int
    """Added to the index to seed a sample: the splits must not hold the same pictures."""

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        return map(self._sample, indices)

    @property
    def labels(self) -> None:
        """There is no list of them."""

    def file(self, index: int) -> None:
        """Return nothing: pixels are made up."""

    def content(self, index: int) -> bytes:
        """Return picture and label as bytes."""
        picture, label = self._sample(index)
        return picture.numpy().tobytes() + str(label).encode()

    def _sample(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index + self.offset)
        noise = torch.randn(self.shape, generator=generator)
        label = torch.randint(0, self.num_classes, (1,), generator=generator)
        return noise.mul_(255).to(torch.int32).to(torch.uint8), int(label)


def open_fake(recipe: Sections) -> Data:
    """Make up the splits: data.fake_channels, data.image_size and data.fake_classes say what of."""
    data = recipe.data
    side = data.image_size
    if side is None:
        raise RecipeError("data.source=fakedata needs data.image_size: the side in pixels of the generated images")
    shape = (data.fake_channels, side, side)
    sizes_and_offsets = ((data.fake_train_samples, 0), (data.fake_test_samples, data.fake_train_samples))
    train, test = (
        _split(FakeReader(shape, data.fake_classes, offset), size, recipe=recipe, training=offset == 0)
        for size, offset in sizes_and_offsets
    )
    return Data(train, None, test)


def _split(read: FakeReader, size: int, *, recipe: Sections, training: bool) -> Source:
    classes = tuple(str(label) for label in range(read.num_classes))
    channels, height, width = read.shape
    identity = fingerprint(classes, size, read.content, samples=FINGERPRINT_SAMPLES)
    return PictureSource(
        read=read,
        size=size,
        where=f"the {'train' if training else 'test'} split of fakedata",
        classes=classes,
        channels=channels,
        image_size=(height, width),
        framing=Framing.of(recipe, training=training),
        fingerprint=identity,
    )
