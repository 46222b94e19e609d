"""A picture of the model's input: samples of an augmented batch side by side, each with its target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

_SMALLEST_SIDE, _LARGEST_SIDE = 96, 224
"""Sizes of a shown sample, in pixels: others are scaled to these. The largest is what most networks see."""
_MARGIN, _LINE = 4, 14
"""Between samples, and the height of a line of text, in pixels; the text of Pillow's own font is 11 pixels high."""


def grid(pixels: Any, texts: Sequence[str]) -> Any:
    """Return a picture, uint8 [H, W, 3] (an array): samples, uint8 [n, C, H, W], each over its text."""
    samples = [_sized(_picture(sample)) for sample in pixels]
    columns = math.ceil(math.sqrt(len(samples)))
    width, height = samples[0].width + _MARGIN, samples[0].height + _LINE + _MARGIN
    rows = math.ceil(len(samples) / columns)
    whole = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), "white")
    draw = ImageDraw.Draw(whole)
    for position, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        row, column = divmod(position, columns)
        left, top = _MARGIN + column * width, _MARGIN + row * height
        whole.paste(sample, (left, top))
        draw.text((left, top + sample.height), _fitting(draw, text, sample.width), fill="black")
    return np.asarray(whole)


def _picture(sample: Any) -> Image.Image:
    """A sample, uint8 [C, H, W]: in colour if it has three channels or more, else by its first alone."""
    return Image.fromarray(np.moveaxis(sample[:3], 0, -1) if len(sample) >= 3 else sample[0]).convert("RGB")


def _sized(picture: Image.Image) -> Image.Image:
    side = max(picture.size)
    if side > _LARGEST_SIDE:
        return picture.resize((picture.width * _LARGEST_SIDE // side, picture.height * _LARGEST_SIDE // side))
    return picture.resize(
        (picture.width * (times := max(1, _SMALLEST_SIDE // side)), picture.height * times), Image.Resampling.NEAREST
    )


def text_of(target: Tensor, classes: Sequence[str]) -> str:
    """The class of a sample, or the two that it is mixed from with their shares."""
    if target.ndim == 0:
        return classes[int(target)]
    shares, numbers = target.topk(2)
    names = [classes[int(number)] for number in numbers]
    if shares[1] < 0.005:
        return names[0]
    return " + ".join(f"{name} {share:.0%}" for name, share in zip(names, shares.tolist(), strict=True))


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """As much of a text as is not wider than this."""
    while draw.textlength(text) > width:
        text = text[:-1]
    return text
