"""Sources that make their images one by one: read a picture, bring it to size.

`PictureSource` is for all that does not live in memory as one array; what it reads from is a function of the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from app.data.draws import HostDraws
from app.errors import DataError
from app.tasks.image_classification.data import jpeg
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.image_file import half, is_gray, is_large, opened
from app.tasks.image_classification.data.source import facts_of


class Reader(Protocol):
    """Reads the pictures of a split, each of its own size."""

    @property
    def labels(self) -> np.ndarray | None:
        """All labels, integers [N]; None of made-up data, which is computed sample by sample."""

    def __call__(self, indices: Sequence[int]) -> Iterable[tuple[Tensor, int]]:
        """Return the pictures, each uint8 [C, H, W] of any size, and their labels. Raises DataError naming the sample."""

    def file(self, index: int) -> bytes | None:
        """Return the picture's file as it is stored, or None where pixels are. Raises DataError if it cannot be read."""

    # Of kinds that may hold what cannot be read, also name(index) -> str: how `data.leave_out` names a sample.


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureSource:
    """One split whose pictures are read, and cropped or resized, when they are fetched."""

    workers: ClassVar[bool] = True
    remedy: ClassVar[str] = (
        "shrink the pictures once (samerun data pack --max-side), or copy them to a local disk (data.stage_to)"
    )
    read: Reader
    size: int
    """Number of samples."""
    where: str
    """The split and where it came from, as errors name it."""
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    framing: Framing
    fingerprint: str
    made_of: tuple[Any, ...] | None = None
    """What the pictures are stored in (`kept.stamps`), where they may be decoded once and kept; None where not."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a network for these pictures is built by."""
        return facts_of(self)

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return images and labels, as `Source.fetch` says; without draws, of the pictures' centres."""
        images = torch.empty(len(indices), self.channels, *self.image_size, dtype=torch.uint8)
        labels = torch.empty(len(indices), dtype=torch.int64)
        for row, (picture, label) in enumerate(self.read(indices.tolist())):
            image = self.framing.random(picture, draw.of(row) if draw else None)
            if image.shape != images.shape[1:]:
                raise DataError(self._other_shape(int(indices[row]), image))
            images[row], labels[row] = image, label
        return {"images": images, "labels": labels}

    def _other_shape(self, index: int, image: Tensor) -> str:
        channels, height, width = image.shape
        expected_height, expected_width = self.image_size
        remedy = (
            "set data.image_size, which resizes all pictures"
            if channels == self.channels
            else "store all pictures in the same way"
        )
        return (
            f"sample {index} of {self.where} is {width}x{height} pixels with {channels} channel(s), but the first training "
            f"sample is {expected_width}x{expected_height} with {self.channels}; {remedy}"
        )


def decode(file: Path | BinaryIO, *, channels: int, name: str) -> Tensor:
    """Return the picture in an image file: uint8 [channels, H, W], grayscale if `channels` is 1, RGB if 3.

    By Pillow, or where it is installed torchcodec, which gives the same pixels of a JPEG sooner; torchvision's own decoders
    are deprecated since 0.29. Orientation tags are ignored and palettes looked up, as torchvision's loader does. Raises
    DataError if it cannot be decoded, is not 8 bits a channel, or is in colour where grayscale is expected.
    """
    with opened(file, name) as picture:
        if picture.format == "JPEG" and jpeg.is_installed() and not is_large(picture):
            pixels = jpeg.decoded(picture, _content(file), channels=channels)
            if pixels is not None:
                return pixels
        if is_large(picture):
            picture.draft(None, half(picture))
        picture.load()
        if picture.mode[0] in "IF":
            raise DataError(f"{name} has more than 8 bits per channel (mode {picture.mode}); store it with 8 bits")
        if channels == 1 and not is_gray(picture):
            raise DataError(
                f"{name} is in colour (mode {picture.mode}) in a grayscale data set; store all pictures in the same way"
            )
        # By way of RGBA the colours are the same, without the warning of going to RGB at once.
        plain = picture.convert("RGBA") if picture.mode == "P" and "transparency" in picture.info else picture
        mode = "L" if channels == 1 else "RGB"
        array = np.array(plain if plain.mode == mode else plain.convert(mode))
        return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1)


def _content(file: Path | BinaryIO) -> bytes:
    """Return all of a file, and leave it where it was being read."""
    if isinstance(file, Path):
        return file.read_bytes()
    place = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    return content
