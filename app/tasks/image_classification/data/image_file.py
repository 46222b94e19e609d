"""Image files, opened in one place: every error of Pillow's is a DataError, and no image takes gigabytes.

Pillow refuses images of more than 179 megapixels, of which a PNG file may take 200 kB. An image of more than 64 megapixels is
decoded at half its width and height where libjpeg can do that while it decodes (Pillow's `draft`), and refused otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from app.errors import DataError

MOST_PIXELS = 64_000_000
"""An RGB image of so many takes 0.2 GB as pixels, and up to 1 GB while it is decoded and brought to its size."""


@contextmanager
def opened(file: Path | BinaryIO, name: str) -> Iterator[Image.Image]:
    """Give what Pillow reads of the header of an image file; the block may decode it.

    Raises DataError, with the image's `name`, for whatever goes wrong in Pillow, in the block as well, and if the image is too
    large. If it `is_large`, the block has to call `draft` with half its sides, or less, before it decodes.
    """
    # Each place of the code would print it once. An image that is too large is an error here, and others are small.
    if not any(entry[2] is Image.DecompressionBombWarning for entry in warnings.filters):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(file) as picture:
            # Of a progressive file libjpeg keeps the whole image, as frequencies, whatever the size that it decodes.
            if is_large(picture) and not (isinstance(picture, JpegImageFile) and "progressive" not in picture.info):
                raise DataError(
                    f"{name} has {picture.width}x{picture.height} pixels: above {MOST_PIXELS // 10**6} megapixels only JPEG "
                    "files that are not progressive are decoded; shrink, replace or remove it"
                )
            yield picture
    except DataError:
        raise
    except Exception as error:  # each of Pillow's decoders has its own: OSError, SyntaxError, struct.error, ...
        raise DataError(f"{name} cannot be read as an image ({type(error).__name__}: {error}); replace or remove it") from error


def is_large(picture: Image.Image) -> bool:
    """Return whether an image has more than MOST_PIXELS."""
    return picture.width * picture.height > MOST_PIXELS


def half(picture: Image.Image) -> tuple[int, int]:
    """Return half the width and height, which is little enough of all images that Pillow opens."""
    return picture.width // 2, picture.height // 2


def is_gray(picture: Image.Image) -> bool:
    """Return whether an image has a single channel of light, with or without transparency."""
    return picture.mode in ("1", "L", "LA")
