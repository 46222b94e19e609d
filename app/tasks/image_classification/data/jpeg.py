"""JPEG files to pixels by torchcodec where it is installed (`pip install "samerun[jpeg]"`): Pillow's pixels, sooner.

Both are libjpeg-turbo with its default settings. The copy from Pillow's image to an array costs as much as the decoding for
large photographs (benchmarks/RESULTS.md). What torchcodec does not decode is left to Pillow, and so is the
last word on a file that is damaged.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from PIL import Image
from torch import Tensor

from app.errors import DataError

_END = b"\xff\xd9"  # the marker at the end of every whole JPEG


def decoded(picture: Image.Image, content: bytes, *, channels: int) -> Tensor | None:
    """Return the pixels, uint8 [channels, H, W], of the file `content`, or None if Pillow has to decode it.

    `picture` is what Pillow has read of its header; `channels` is 1 for grayscale, 3 for RGB. Raises DataError if torchcodec is
    installed and cannot be loaded.
    """
    kinds = ("L",) if channels == 1 else ("L", "RGB")
    # torchcodec fills with gray what is missing of a file that was cut, where Pillow refuses it.
    if not (picture.format == "JPEG" and picture.mode in kinds and content.endswith(_END) and is_installed()):
        return None
    try:
        pixels: Tensor = decoder()(content, mode="GRAY" if channels == 1 else "RGB")
    except RuntimeError:  # damaged inside: Pillow says how, or decodes what can be
        return None
    return pixels


@functools.cache
def is_installed() -> bool:
    """Return whether torchcodec is there, without importing it."""
    return importlib.util.find_spec("torchcodec") is not None


@functools.cache
def decoder() -> Callable[..., Any]:
    """Return torchcodec's `decode_jpeg`. Raises DataError if it cannot be loaded."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise DataError(
            f"torchcodec is installed but cannot be loaded ({str(error).strip().splitlines()[0]}); install "
            "the version built for this torch, or uninstall it"
        ) from error
    decode: Callable[..., Any] = decode_jpeg
    return decode
