"""JPEG files that workers only read, and the GPU that trains decodes: data.jpeg_decoder=nvjpeg.

nvJPEG has other pixels than libjpeg where colour is stored at half the resolution, as in most JPEGs: it repeats what libjpeg
interpolates (github.com/sgl-project/sglang/pull/34163). So the recipe says which of the two it is, and what cannot decode so
refuses. What is no plain JPEG, and what nvJPEG cannot decode, is left to the CPU: which, is a function of the file alone.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from app.data import jpeg
from app.data.framing import Framing
from app.data.pictures import PictureSource, decode
from app.data.source import first_line
from app.errors import RecipeError
from app.recipe import Recipe

_TOGETHER = 64
"""Files that are decoded in one call, whose whole pictures a GPU then holds: 1.3 GB of 6.7 megapixels each."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The pictures of a batch, most of them still JPEG files; `to` makes images of them on a device.

    That is what Accelerate calls to bring a batch to its device, with anything that has such a method.
    """

    files: Tensor
    """The JPEG files one after the other, uint8 [bytes]. One tensor: each one that leaves a worker takes a descriptor."""
    lengths: Sequence[int]
    """Of the files, in bytes."""
    rows: Sequence[int]
    """Their places in the batch."""
    samples: Sequence[int]
    """Their sample numbers."""
    names: Sequence[str]
    """By which errors name them."""
    images: Tensor
    """All others, ready: uint8 [n, C, H, W]."""
    images_rows: Sequence[int]
    framing: Framing

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        """Return the images, uint8 [B, C, H, W], on a device. Raises DataError if a file cannot be decoded."""
        size = len(self.rows) + len(self.images_rows)
        images = torch.empty(size, *self.images.shape[1:], dtype=torch.uint8, device=device)
        if self.images_rows:
            images[torch.tensor(self.images_rows, device=device)] = self.images.to(device, non_blocking=non_blocking)
        files = self.files.split(list(self.lengths))
        for start in range(0, len(files), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            pictures = _decoded(files[part], self.names[part], channels=images.shape[1], device=device)
            for row, sample, picture in zip(self.rows[part], self.samples[part], pictures, strict=True):
                images[row] = self.framing.random(picture, sample)
        return images


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredSource(PictureSource):
    """One split whose JPEG files the device decodes. `fetch` decodes on the CPU, for tools that only look at pictures."""

    def fetch_stored(self, indices: Sequence[int], samples: Sequence[int]) -> tuple[Stored, Tensor]:
        """Return the pictures of so many samples as they are stored, and their labels, int64 [B].

        Raises:
            DataError: A file cannot be read, or one that is no plain JPEG cannot be decoded.
        """
        labels = self.read.labels
        assert labels is not None
        files: list[tuple[int, bytes]] = []
        images: list[tuple[int, Tensor]] = []
        for row, index in enumerate(indices):
            content = self.read.file(index)
            if content is not None and _is_for_nvjpeg(content, self.channels):
                files.append((row, content))
            else:
                ((picture, _),) = self.read([index])
                images.append((row, self.framing.random(picture, samples[row])))
        none = torch.empty(0, self.channels, *self.image_size, dtype=torch.uint8)
        stored = Stored(
            files=torch.from_numpy(np.frombuffer(b"".join(content for _, content in files), np.uint8).copy()),
            lengths=[len(content) for _, content in files],
            rows=[row for row, _ in files],
            samples=[samples[row] for row, _ in files],
            names=[f"sample {indices[row]} of {self.where}" for row, _ in files],
            images=torch.stack([image for _, image in images]) if images else none,
            images_rows=[row for row, _ in images],
            framing=self.framing,
        )
        return stored, torch.from_numpy(labels[list(indices)]).long()


def check(recipe: Recipe, device: torch.device) -> None:
    """Check that the recipe's JPEG files can be decoded on this device, by decoding one.

    Raises RecipeError, saying what is missing, if they cannot.
    """
    if recipe.data.jpeg_decoder != "nvjpeg":
        return
    if device.type != "cuda":
        raise RecipeError(
            f"data.jpeg_decoder is nvjpeg, which needs an NVIDIA GPU, and this process trains on {device.type}. Nothing takes "
            "its place, because its pixels are not libjpeg's: train on a GPU, or leave it out (libjpeg)."
        )
    if not jpeg.is_installed():
        raise RecipeError(
            'data.jpeg_decoder is nvjpeg, which torchcodec calls, and that is not installed: pip install "samerun[jpeg]"'
        )
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        jpeg.decoder()([file.getvalue()], device=device)
    except RuntimeError as error:
        raise RecipeError(
            f"data.jpeg_decoder is nvjpeg, and torchcodec cannot decode on {device}: {first_line(error)}. Install a torchcodec "
            "that is made for this torch and its CUDA, or leave it out (libjpeg)."
        ) from error


def _is_for_nvjpeg(content: bytes, channels: int) -> bool:
    header = jpeg.header_of(content, channels=channels)
    return header is not None and not (header.mode == "RGB" and header.info.get("adobe_transform") == 0)  # stored as RGB


def _decoded(files: Sequence[Tensor], names: Sequence[str], *, channels: int, device: torch.device) -> list[Tensor]:
    """Return the pictures, each uint8 [channels, H, W], on the device."""
    try:
        pictures: list[Tensor] = jpeg.decoder()(list(files), mode=jpeg.mode_of(channels), device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if len(files) > 1:  # one by one, so that the others' pixels stay nvJPEG's
            alone = [_decoded(files[n : n + 1], names[n : n + 1], channels=channels, device=device) for n in range(len(files))]
            return [picture for (picture,) in alone]
        warnings.warn(f"{names[0]} is decoded on the CPU, because nvJPEG cannot: {first_line(error)}", stacklevel=2)
        return [decode(io.BytesIO(files[0].numpy().tobytes()), channels=channels, name=names[0]).to(device)]
    return pictures
