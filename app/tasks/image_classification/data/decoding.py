"""Images in files and arrays to pixels of the size that the model sees. Every error of a decoder is a DataError.

Pillow refuses images of more than 179 megapixels, of which a PNG file may take 200 kB. An image of more than 64 megapixels is
decoded at half its width and height where libjpeg can do that while it decodes (Pillow's `draft`), and refused otherwise.

Where torchcodec is installed (`pip install -e ".[jpeg]"`) it decodes JPEG files: the same pixels, faster, since both use
libjpeg-turbo with its default settings and Pillow copies the image into an array (benchmarks/RESULTS.md). Pillow decodes what
torchcodec does not, and reports what is damaged. torchvision's own decoders are deprecated since 0.29.

The geometry is torchvision's, so that published recipes keep their meaning: `Resize` and `CenterCrop`, or
`RandomResizedCrop`, all with antialiasing. The random crop is a function of the sample's draws alone.
"""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor
from torch.nn import functional as F

from app.data.data_files import reading
from app.data.draws import SampleDraws
from app.errors import DataError
from app.files import text_files
from app.tasks.image_classification.sections import Sections

MOST_PIXELS = 64_000_000
"""An RGB image of this size takes 0.2 GB as pixels, and up to 1 GB while it is decoded and brought to its size."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of image files, in small letters, as in torchvision's ImageFolder."""
CHANNELS = (1, 3, 4)
"""Numbers of channels that tell channels from rows in an array of three dimensions."""
_END = b"\xff\xd9"  # the marker at the end of every whole JPEG


def content_of(path: Path, name: str = "") -> bytes:
    """Return the content of an image file; `name` is its name in errors, in addition to the path. Raises DataError."""
    with reading(f"{path}{name}"), text_files.opened(path) as file:
        if content := file.read():
            return content
    raise DataError(f"{path}{name} is empty; replace or remove it")


@contextmanager
def opened(content: bytes, name: str) -> Iterator[Image.Image]:
    """Give what Pillow reads of the header of an image file; the block may decode it.

    Raises DataError, with the image's `name`, for whatever goes wrong in Pillow, in the block as well, and if the image is too
    large. If it `is_large`, the block has to call `draft` with half its sides, or less, before it decodes.
    """
    # Each place of the code would print it once. An image that is too large is an error here, and others are small.
    if not any(entry[2] is Image.DecompressionBombWarning for entry in warnings.filters):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(content)) as image:
            # Of a progressive file libjpeg keeps the whole image, as frequencies, whatever the size that it decodes.
            if is_large(image) and not (isinstance(image, JpegImageFile) and "progressive" not in image.info):
                size, most = f"{image.width}x{image.height} pixels", f"above {MOST_PIXELS // 10**6} megapixels"
                raise DataError(f"{name} has {size}: {most} only baseline JPEG files are decoded; shrink, replace or remove it")
            yield image
    except DataError:
        raise
    except Exception as error:  # each of Pillow's decoders has its own: OSError, SyntaxError, struct.error, ...
        why = f"{type(error).__name__}: {error}".partition(" <_io.")[0]
        raise DataError(f"{name} cannot be read as an image ({why}); replace or remove it") from error


def is_large(image: Image.Image) -> bool:
    """Return True for an image of more than MOST_PIXELS."""
    return image.width * image.height > MOST_PIXELS


def is_gray(image: Image.Image) -> bool:
    """Return True for an image with a single channel of light, with or without transparency."""
    return image.mode in ("1", "L", "LA")


def decode(content: bytes, *, channels: int, name: str) -> Tensor:
    """Return the image in the content of an image file: uint8 [channels, H, W], grayscale if `channels` is 1, RGB otherwise.

    Orientation tags are ignored and palettes looked up, as torchvision's loader does. Raises DataError if it cannot be decoded,
    is not 8 bits a channel, or is in color where grayscale is expected.
    """
    with opened(content, name) as image:
        kinds = ("L",) if channels == 1 else ("L", "RGB")
        if is_large(image):
            image.draft(None, (image.width // 2, image.height // 2))
        # torchcodec fills what is missing of a truncated file with gray, where Pillow refuses the file.
        elif image.format == "JPEG" and image.mode in kinds and content.endswith(_END) and (decoder := torchcodec()):
            try:
                pixels: Tensor = decoder(content, mode="GRAY" if channels == 1 else "RGB")
            except RuntimeError:  # damaged inside: Pillow reports it, or decodes what can be
                pass
            else:
                return pixels
        image.load()
        if image.mode[0] in "IF":
            raise DataError(f"{name} has more than 8 bits per channel (mode {image.mode}); store it with 8 bits")
        if channels == 1 and not is_gray(image):
            raise DataError(f"{name} is in color (mode {image.mode}) in a grayscale data set; store all images in the same way")
        array = np.array(converted(image, "L" if channels == 1 else "RGB"))
        return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)


def converted(image: Image.Image, mode: str) -> Image.Image:
    """Return an image in mode "L" or "RGB", without transparency."""
    # By way of RGBA the colors are the same, without the warning of a direct conversion to RGB.
    plain = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
    return plain if plain.mode == mode else plain.convert(mode)


@functools.cache
def torchcodec() -> Callable[..., Any] | None:
    """Return torchcodec's `decode_jpeg`; None if it is not installed."""
    try:
        from torchcodec.decoders import decode_jpeg
    except ModuleNotFoundError:
        return None
    decoder: Callable[..., Any] = decode_jpeg
    return decoder


def pixels_of(value: Any, *, name: str) -> Tensor:
    """Return the image, uint8 [C, H, W], in an array of numbers: [H, W], [H, W, C] or [C, H, W], with 1, 3 or 4 channels.

    Raises DataError if the array has another shape, or its numbers are not whole and in 0..255.
    """
    array = np.asarray(value)
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and array.shape[2] in CHANNELS:
        array = array.transpose(2, 0, 1)
    is_image = array.dtype.kind in "iu" and array.ndim == 3 and array.shape[0] in CHANNELS
    if not is_image or array.size == 0 or array.min() < 0 or array.max() > 255:
        values = f" with {array.min()}..{array.max()}" if is_image and array.size else ""
        raise DataError(
            f"{name} is an array of {array.dtype} {list(array.shape)}{values}; store integers in 0..255 (uint8) as [H, W], "
            f"[H, W, C] or [C, H, W], with C one of {CHANNELS}"
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.uint8))


def as_pillow(pixels: Tensor) -> Image.Image:
    """Return an image, uint8 [C, H, W], as Pillow has it: in color if it has three channels or more, else its first alone."""
    return Image.fromarray((pixels[0] if len(pixels) < 3 else pixels[:3].permute(1, 2, 0)).numpy())


# torchvision's RandomResizedCrop: how often it tries, and between which shapes (width / height).
TRIES = 10
RATIOS = (3 / 4, 4 / 3)


@dataclass(frozen=True, kw_only=True)
class Framing:
    """Rule by which stored images become images of one size."""

    image_size: int | None = None
    """Side in pixels of the images; None: as stored."""
    resize_size: int | None = None
    """Pixels the shorter side gets before the center crop; None: image_size."""
    interpolation: str = "bilinear"
    """Interpolation of resized images, "bilinear" or "bicubic"."""
    min_area: float | None = None
    """Smallest share of the stored image that a random crop keeps; None: the center crop. Needs image_size."""

    @classmethod
    def of(cls, recipe: Sections, *, training: bool) -> Framing:
        """Return the framing a recipe asks for; only training images are cropped at random."""
        data, min_area = recipe.data, recipe.augment.resized_crop_min_area if training else None
        sizes = {"image_size": data.image_size, "resize_size": data.resize_size}
        return cls(**sizes, interpolation=data.interpolation, min_area=min_area)

    def size_of(self, stored: tuple[int, int]) -> tuple[int, int]:
        """Return height and width in pixels of the image made of one of `stored` height and width."""
        return stored if self.image_size is None else (self.image_size, self.image_size)

    def random(self, image: Tensor, draws: SampleDraws | None) -> Tensor:
        """Return a stored image (uint8 [C, H, W]) cropped by a sample's draws; without them or min_area, the `fixed` one."""
        if self.image_size is None or self.min_area is None or draws is None:
            return self.fixed(image)
        height, width = image.shape[-2:]
        top, left, box_height, box_width = crop_box(height, width, draws, min_area=self.min_area)
        box = image[..., top : top + box_height, left : left + box_width]
        return resize(box, (self.image_size, self.image_size), self.interpolation)

    def fixed(self, images: Tensor) -> Tensor:
        """Return stored images of one size (uint8 [..., C, H, W]), resized and cropped at the center."""
        if self.image_size is None:
            return images
        height, width, target = *images.shape[-2:], self.resize_size or self.image_size
        size = int(target * height / min(height, width)), int(target * width / min(height, width))
        top, left = round((size[0] - self.image_size) / 2), round((size[1] - self.image_size) / 2)
        resized = resize(images, size, self.interpolation)
        return resized[..., top : top + self.image_size, left : left + self.image_size]


def crop_box(height: int, width: int, draws: SampleDraws, *, min_area: float) -> tuple[int, int, int, int]:
    """Return top, left, height and width in pixels of a random part of an image of the given size.

    As torchvision's RandomResizedCrop.get_params: of up to ten boxes, with an area uniform in [min_area, 1] of the image
    and a logarithm of width / height uniform in log(3/4)..log(4/3), the first that fits; else the largest central box with
    a shape in that range.
    """
    low, high = (math.log(ratio) for ratio in RATIOS)
    for attempt in range(TRIES):
        area = height * width * (min_area + (1 - min_area) * draws.uniform(f"crop area {attempt}"))
        ratio = math.exp(low + (high - low) * draws.uniform(f"crop ratio {attempt}"))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = draws.integers("crop top", height - box_height + 1)
            return top, draws.integers("crop left", width - box_width + 1), box_height, box_width
    box_height, box_width = min(height, round(width / RATIOS[0])), min(width, round(height * RATIOS[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resize(images: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Return `images` (uint8 [..., C, H, W], on the CPU) at `size` (height, width), with antialiasing."""
    if tuple(images.shape[-2:]) == size:
        return images
    flat = images.reshape(-1, *images.shape[-3:])
    resized = F.interpolate(flat, size=size, mode=interpolation, antialias=True)
    return resized.reshape(*images.shape[:-2], *size)
