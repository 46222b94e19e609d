"""Turns a batch of stored images into the model's input: augmented (RandAugment, arXiv:1909.13719), normalized, mixed in pairs.

The same fourteen operations with the same strengths as `torchvision.transforms.RandAugment`, which draws one operation for
a whole batch and walks through Python for each image; here every image has its own operation and sign, and the images
that share an operation are changed together. The strength is given on the scale 0..10: torchvision's bin 30 is 10.
What happens to an image does not depend on the images beside it, bit for bit: sums are taken over whole numbers, and
nothing goes through a library kernel whose rounding may vary with the batch.

All of it works on whole batches, on the device of the batch, after the copy to it. Every random choice is a draw for the
sample's number (`draws.py`), so a sample becomes the same image on any topology. Mixup and cutmix mix the pairs at positions
2k and 2k+1, which are the same as long as micro-batches are even and cut at even positions.

    preparation = Preparation(recipe.data, recipe.augment, num_classes=10, channels=3)
    inputs, targets = preparation.train(batch, Draws(recipe.seed, batch["samples"]))    # batch: that of `loader.py`
    inputs = preparation.evaluate(batch)

Nothing here waits for the device: what the host has to know of a draw, it computes itself. Random resized crops are made where
an image is decoded: they need the whole image.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.data.draws import Draws
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe

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

    X and Y are the pixels between a place and the image's center; the factors are numbers or [n, 1, 1].
    """
    height, width = images.shape[-2:]
    center_x, center_y = (width - 1) / 2, (height - 1) / 2
    at_x = torch.arange(width, device=images.device) - center_x
    at_y = (torch.arange(height, device=images.device) - center_y).unsqueeze(1)
    columns = torch.round(x[0] * at_x + x[1] * at_y + x[2] + center_x)
    rows = torch.round(y[0] * at_x + y[1] * at_y + y[2] + center_y)
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
    blurred[inner] = torch.round((square + 4 * pixels[inner]) / 13)  # weights 1, but 5 at the center; the border stays
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


# Zhong et al. 2017, "Random erasing" (arXiv:1708.04896), with the defaults of torchvision's RandomErasing.
_ERASED_AREA = (0.02, 0.33)  # share of the image
_ERASED_RATIO = (0.3, 3.3)  # height to width
_ERASE_TRIES = 10  # rectangles drawn until one fits into the image; if none does, nothing is erased


class Preparation:
    """Prepares batches as the recipe says. Its only state are two constants, kept on the device of the last batch."""

    def __init__(
        self,
        data: DataRecipe,
        augment: AugmentRecipe,
        *,
        num_classes: int,
        channels: int,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        """`channels` is the data's C; `dtype` and `channels_last` say what the model wants: a float type, a memory order.

        data.mean and data.std have one value, or `channels`.
        """
        mean, std = (values * (channels // len(values)) for values in (data.mean, data.std))
        # (pixel / 255 - mean) / std, as one multiplication and one addition. Half precision would lose digits on the way,
        # so the computing is done in float32 at least, and what is handed out is rounded once.
        computing = torch.promote_types(dtype, torch.float32)
        self._scale = torch.tensor([1 / (255 * s) for s in std], dtype=computing).view(-1, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=computing).view(-1, 1, 1)
        self._dtype = dtype
        self._augment = augment
        self._num_classes = num_classes
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def train(self, batch: Mapping[str, Any], draws: Draws) -> tuple[Tensor, Tensor]:
        """Return inputs [B, C, H, W] in the model's type, and targets.

        A batch is one of `loader.py`, `draws` are for its samples. RandAugment on another device than the CPU needs them on the
        host as well.

        Targets are the labels int64 [B], or where the recipe mixes pairs float32 (float64 for float64) [B, num_classes].
        """
        augment, images, labels = self._augment, batch["images"], batch["labels"]
        inputs = self._normalized(self._changed(images, draws))
        if augment.erase > 0:
            inputs = inputs.masked_fill_(erased_mask(draws, augment.erase, images.shape[-2], images.shape[-1]), 0)
        if augment.mixes_pairs:
            targets = F.one_hot(labels, self._num_classes).to(inputs.dtype)
            inputs, labels = self._mixed(inputs, targets, draws)
        return self._finished(inputs), labels

    def evaluate(self, batch: Mapping[str, Any]) -> Tensor:
        """Return inputs [B, C, H, W] in the model's type: normalized and nothing else."""
        return self._finished(self._normalized(batch["images"]))

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the images uint8 [B, C, H, W] that the model sees in its inputs [B, C, H, W], on any device."""
        scale, shift = self._scale.to(inputs.device), self._shift.to(inputs.device)
        return ((inputs.to(scale.dtype) - shift) / scale).round_().clamp_(0, 255).to(torch.uint8)

    def _normalized(self, images: Tensor) -> Tensor:
        if self._scale.device != images.device:
            self._scale, self._shift = self._scale.to(images.device), self._shift.to(images.device)
        # With each channel's pixels next to each other this takes half the time. Those of a single channel are in either order.
        order = self._memory_format if images.shape[1] == 1 else torch.contiguous_format
        inputs = images.to(self._scale.dtype, memory_format=order)
        return inputs.mul_(self._scale).add_(self._shift)  # on CPU a third of addcmul's time

    def _finished(self, inputs: Tensor) -> Tensor:
        return inputs.to(self._dtype, memory_format=self._memory_format)

    def _changed(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the images uint8 [B, C, H, W] cropped, flipped and through RandAugment."""
        augment = self._augment
        if augment.crop_padding > 0:
            images = _crop(images, draws, augment.crop_padding)
        if augment.flip > 0:
            flipped = (draws.uniform("flip") < augment.flip).view(torch.uint8).view(-1, 1, 1, 1)
            images = torch.addcmul(images, images.flip(3).sub_(images), flipped)  # modulo 256; on CPU half of where's time
        for turn in range(augment.randaugment_ops):
            purpose = f"randaugment.operation.{turn}"
            operations = draws.integers(purpose, len(OPERATIONS))
            # How many of which there are. Those of a GPU the host draws once more by itself.
            on_host = operations.numpy() if operations.is_cpu else draws.on_host.integers(purpose, len(OPERATIONS))
            counts: list[int] = np.bincount(on_host, minlength=len(OPERATIONS)).tolist()
            negative = draws.uniform(f"randaugment.sign.{turn}") < 0.5
            images = randaugment(images, operations, negative, counts=counts, magnitude=augment.randaugment_magnitude)
        return images

    def _mixed(self, inputs: Tensor, targets: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return inputs and targets [B, num_classes], each mixed with its neighbour's: itself by its share, 0..1."""
        assert len(inputs) % 2 == 0, f"mixing needs pairs, but the micro-batch has {len(inputs)} samples"
        height, width = inputs.shape[-2:]
        weights, shares = mixing_weights(draws.every(2), self._augment, height, width)
        neighbour = torch.arange(len(inputs), device=inputs.device) ^ 1
        weights = weights.to(inputs.dtype).repeat_interleave(2, 0).unsqueeze(1)
        shares = shares.to(inputs.dtype).repeat_interleave(2).unsqueeze(1)
        # lerp gives exactly one of its ends at weights 0 and 1: outside its box cutmix changes no bit.
        return torch.lerp(inputs[neighbour], inputs, weights), torch.lerp(targets[neighbour], targets, shares)


def erased_mask(draws: Draws, probability: float, height: int, width: int) -> Tensor:
    """Return bool [B, 1, height, width], true in the rectangle to erase, as in torchvision's RandomErasing."""
    tries = draws.streams(_ERASE_TRIES)
    (least, most), (flattest, tallest) = _ERASED_AREA, map(math.log, _ERASED_RATIO)
    area = height * width * (least + (most - least) * tries.uniform("erase.area"))
    ratio = torch.exp(flattest + (tallest - flattest) * tries.uniform("erase.ratio"))
    heights, widths = torch.round(torch.sqrt(area * ratio)).long(), torch.round(torch.sqrt(area / ratio)).long()
    fits = (heights < height) & (widths < width)
    first = fits.to(torch.uint8).argmax(0, keepdim=True)  # argmax of equals: the first
    wanted = fits.any(0) & (draws.uniform("erase") < probability)
    erased_height = heights.gather(0, first)[0] * wanted
    erased_width = widths.gather(0, first)[0] * wanted
    top = draws.integers("erase.top", height - erased_height + 1)
    left = draws.integers("erase.left", width - erased_width + 1)
    return _box(top, top + erased_height, left, left + erased_width, height, width).unsqueeze(1)


def mixing_weights(pairs: Draws, augment: AugmentRecipe, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return how much each member keeps of itself: per pixel, float32 [P, height or 1, width or 1], and on average [P].

    Mixup (Zhang et al. 2017, arXiv:1710.09412) keeps a share from Beta(mixup, mixup) of every pixel. Cutmix (Yun et al.
    2019, arXiv:1905.04899) keeps all outside a box of the image's shape whose area share is 1 minus a share from
    Beta(cutmix, cutmix), around a uniform center and cut off at the border; the label's share is what is left in the end.
    """
    if augment.cutmix == 0:
        shares = pairs.beta("mixup", augment.mixup)
        return shares.view(-1, 1, 1), shares
    side = torch.sqrt(1 - pairs.beta("cutmix", augment.cutmix)) / 2
    half_height, half_width = (side * height).long(), (side * width).long()
    row, column = pairs.integers("cutmix.row", height), pairs.integers("cutmix.column", width)
    top, bottom = (row - half_height).clamp(min=0), (row + half_height).clamp(max=height)
    left, right = (column - half_width).clamp(min=0), (column + half_width).clamp(max=width)
    weights = (~_box(top, bottom, left, right, height, width)).to(torch.float32)
    shares = 1 - (bottom - top) * (right - left) / (height * width)
    if augment.mixup > 0:
        mixes = pairs.uniform("mixup_or_cutmix") < 0.5
        mixup_shares = pairs.beta("mixup", augment.mixup)
        weights = torch.where(mixes.view(-1, 1, 1), mixup_shares.view(-1, 1, 1), weights)
        shares = torch.where(mixes, mixup_shares, shares)
    return weights, shares


def _crop(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """Return the images moved by -padding..padding pixels each way, 0 where nothing was: a crop of the padded image."""
    height, width = images.shape[-2:]
    top = draws.integers("crop.top", 2 * padding + 1) - padding
    left = draws.integers("crop.left", 2 * padding + 1) - padding
    rows = torch.arange(height, device=images.device) + top.unsqueeze(1)
    columns = torch.arange(width, device=images.device) + left.unsqueeze(1)
    return pixels_at(images, rows.unsqueeze(2), columns.unsqueeze(1))


def _box(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, height: int, width: int) -> Tensor:
    """Return bool [n, height, width]: true in rows top..bottom-1 and columns left..right-1, each int64 [n]."""
    rows = torch.arange(height, device=top.device)
    columns = torch.arange(width, device=top.device)
    in_rows = (rows >= top.unsqueeze(1)) & (rows < bottom.unsqueeze(1))
    in_columns = (columns >= left.unsqueeze(1)) & (columns < right.unsqueeze(1))
    return in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
