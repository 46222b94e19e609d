"""The operations of RandAugment (Cubuk et al. 2019, arXiv:1909.13719) on whole batches of uint8 images.

The same fourteen operations with the same strengths as `torchvision.transforms.RandAugment`, which draws one operation for
a whole batch and walks through Python for each image; here every image has its own operation and sign, and the images
that share an operation are changed together. The strength is given on the scale 0..10: torchvision's bin 30 is 10.
What happens to an image does not depend on the images beside it, bit for bit: sums are taken over whole numbers, and
nothing goes through a library kernel whose rounding may vary with the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MAX_SHEAR = 0.3  # of a side per side
_MAX_TRANSLATION = 150 / 331  # of a side
_MAX_ROTATION_DEGREES = 30.0
_MAX_BLEND = 0.9  # a blend's factor is 1 plus or minus this
_MAX_POSTERIZED_BITS = 4


def randaugment(images: Tensor, operations: Tensor, negative: Tensor, *, counts: Sequence[int], magnitude: float) -> Tensor:
    """Return the images with one operation applied to each.

    `images`: uint8 [B, C, H, W]; `operations`: int64 [B], places in OPERATIONS; `negative`: bool [B], whether a signed
    operation goes the other way; `counts`: how many images each of OPERATIONS has, which the host has to know beforehand: to
    ask a GPU is to wait until it has done all that it was given; `magnitude`: strength on the scale 0..10.
    """
    changed = images.clone()
    order = operations.argsort(stable=True)
    for operation, rows in zip(OPERATIONS.values(), order.split(list(counts)), strict=True):
        if len(rows) > 0:
            changed[rows] = operation(images[rows], negative[rows], magnitude / 10)
    return changed


def pixels_at(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return uint8 [B, C, H, W]: at each place the pixel of `images` at (rows, columns), or 0 where that lies outside.

    `images`: uint8 [B, C, H, W]; `rows`, `columns`: int64 that broadcast to [B, H, W].
    """
    height, width = images.shape[-2:]
    inside = ((rows >= 0) & (rows < height)) & ((columns >= 0) & (columns < width))
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    pixels = images.flatten(2).gather(2, places.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1))
    return pixels.view_as(images) * inside.unsqueeze(1)


# Every operation takes images uint8 [n, C, H, W], `negative` bool [n] and the strength 0..1, and returns new images.


def _signed(size: float, negative: Tensor) -> Tensor:
    """Return float32 [n, 1, 1]: plus or minus size."""
    return torch.where(negative, -size, size).to(torch.float32).view(-1, 1, 1)


def _warp(images: Tensor, *, x: tuple[Tensor | float, ...], y: tuple[Tensor | float, ...]) -> Tensor:
    """Return the nearest pixels at x[0] * X + x[1] * Y + x[2] and y[0] * X + y[1] * Y + y[2] of each place (X, Y).

    X and Y are the pixels between a place and the image's centre; the factors are numbers or [n, 1, 1].
    """
    height, width = images.shape[-2:]
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    at_x = torch.arange(width, device=images.device) - centre_x
    at_y = (torch.arange(height, device=images.device) - centre_y).unsqueeze(1)
    columns = torch.round(x[0] * at_x + x[1] * at_y + x[2] + centre_x)
    rows = torch.round(y[0] * at_x + y[1] * at_y + y[2] + centre_y)
    return pixels_at(images, rows.expand(len(images), -1, -1).long(), columns.expand(len(images), -1, -1).long())


def _blend(images: Tensor, others: Tensor | float, negative: Tensor, strength: float) -> Tensor:
    """Return others + factor * (images - others), cut to 0..255; the factor is 1 plus or minus 0.9 times the strength."""
    excess = _MAX_BLEND * strength
    factor = torch.where(negative, 1 - excess, 1 + excess).to(torch.float32).view(-1, 1, 1, 1)
    # In this form pixels that agree stay as they are: rounded down from 76.99999, a plain 77 would become 76.
    return (others + factor * (images.to(torch.float32) - others)).clamp_(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return uint8 [n, 1, H, W] for colour images (ITU-R 601 luma, torchvision's digits), and others as they are."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).to(torch.uint8).unsqueeze(1)


def _contrast(images: Tensor, negative: Tensor, strength: float) -> Tensor:
    grey = _grey(images)
    mean = grey.sum((1, 2, 3), keepdim=True, dtype=torch.int64).to(torch.float32) / grey[0].numel()
    return _blend(images, mean, negative, strength)


def _sharpness(images: Tensor, negative: Tensor, strength: float) -> Tensor:
    if min(images.shape[-2:]) <= 2:
        return images
    pixels = images.to(torch.float32)  # whole numbers below 2**24: the sums are exact in any order
    across = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
    square = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    inner = (..., slice(1, -1), slice(1, -1))
    blurred = pixels.clone()
    blurred[inner] = torch.round((square + 4 * pixels[inner]) / 13)  # weights 1, but 5 at the centre; the border stays
    return _blend(images, blurred, negative, strength)


def _rotate(images: Tensor, negative: Tensor, strength: float) -> Tensor:
    angle = math.radians(_MAX_ROTATION_DEGREES * strength)
    cosine, sine = math.cos(angle), _signed(math.sin(angle), negative)
    return _warp(images, x=(cosine, -sine, 0), y=(sine, cosine, 0))


def _shear(images: Tensor, negative: Tensor, strength: float, *, dimension: int) -> Tensor:
    """Return the images sheared along one dimension (-1: x, -2: y); the top or left edge stays where it is."""
    shear = _signed(_MAX_SHEAR * strength, negative)
    if dimension == -1:
        return _warp(images, x=(1, shear, shear * (images.shape[-2] / 2)), y=(0, 1, 0))
    return _warp(images, x=(1, 0, 0), y=(shear, 1, shear * (images.shape[-1] / 2)))


def _translate(images: Tensor, negative: Tensor, strength: float, *, dimension: int) -> Tensor:
    shift = -_signed(int(_MAX_TRANSLATION * images.shape[dimension] * strength), negative)
    return _warp(images, x=(1, 0, shift * (dimension == -1)), y=(0, 1, shift * (dimension == -2)))


def _functional() -> Any:
    from torchvision.transforms.v2 import functional  # not at the top: it takes a second

    return functional


def _autocontrast(images: Tensor, negative: Tensor, strength: float) -> Tensor:  # noqa: ARG001
    darkest = images.amin((2, 3), keepdim=True).to(torch.float32)
    span = images.amax((2, 3), keepdim=True) - darkest
    stretched = ((images - darkest) * (255 / span)).clamp_(0, 255).to(torch.uint8)
    return torch.where(span > 0, stretched, images)


OPERATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "identity": lambda images, _, __: images,
    "shear_x": functools.partial(_shear, dimension=-1),
    "shear_y": functools.partial(_shear, dimension=-2),
    "translate_x": functools.partial(_translate, dimension=-1),
    "translate_y": functools.partial(_translate, dimension=-2),
    "rotate": _rotate,
    "brightness": lambda images, negative, strength: _blend(images, 0.0, negative, strength),
    "color": lambda images, *how: _blend(images, _grey(images), *how) if images.shape[1] == 3 else images,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": lambda images, _, strength: _functional().posterize_image(images, 8 - round(_MAX_POSTERIZED_BITS * strength)),
    "solarize": lambda images, _, strength: _functional().solarize_image(images, 255 * (1 - strength)),
    "autocontrast": _autocontrast,
    "equalize": lambda images, _, __: _functional().equalize_image(images),
}
