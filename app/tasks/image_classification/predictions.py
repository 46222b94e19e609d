"""Predictions: single images, the confusion counts and images of the last evaluation, and samples of an augmented batch.

test_predictions/predictions.json   classes, counts of label and prediction, and what the pictures show
test_predictions/SAMPLE.png         a test picture, at most 72 pixels wide and high
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from app.runs import run_folder
from app.tasks.image_classification.data.decoding import Framing, content_of, decode, resize
from app.tasks.image_classification.data.images import Images, spread

_SPREAD_PICTURES, _MISTAKEN_PICTURES = 6, 6
_PICTURE_SIDE = 72
"""Pixels. 12 pictures of noise, the worst case for compression, take less than 200 kB."""
_ALL_PAIRS_CLASSES, _MOST_PAIRS = 100, 1000
"""Up to this many classes every pair of label and prediction is recorded; beyond, only the most frequent mistakes."""


class Prediction(NamedTuple):
    """What a model made of one test sample."""

    sample: int
    """Its index, from 0."""
    label: int
    predicted: int
    probability: float
    """That of the predicted class, 0..1, in thousandths: the last bits of it differ between topologies."""


class Predictions(NamedTuple):
    """What a model made of a test set."""

    pairs: Counter[tuple[int, int]]
    """How many samples have a label and a predicted class."""
    spread: list[Prediction]
    """Some samples spread evenly over the data."""
    mistakes: list[Prediction]
    """Those of which the model was most certain, the most certain first."""


def of(rows: Tensor) -> Predictions:
    """Return what a model made of a test set; `rows` is float64 [N, 3]: label, predicted class, and its probability."""
    labels, predicted = rows[:, 0].long(), rows[:, 1].long()
    sure = rows[:, 2].round(decimals=3)
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))

    def prediction(sample: int) -> Prediction:
        return Prediction(sample, int(labels[sample]), int(predicted[sample]), float(sure[sample]))

    wrong = (labels != predicted).nonzero()[:, 0]
    surest = wrong[sure[wrong].argsort(descending=True, stable=True)[:_MISTAKEN_PICTURES]]
    return Predictions(
        pairs=pairs,
        spread=[prediction(sample) for sample in spread(len(rows), _SPREAD_PICTURES)],
        mistakes=[prediction(sample) for sample in surest.tolist()],
    )


def write(folder: Path, source: Images, found: Predictions) -> None:
    """Write what was found on `source` into a folder: the counts, and the pictures. Raises DataError if a picture is gone."""
    shown = list(dict.fromkeys(found.spread + found.mistakes))
    indices = np.array([row.sample for row in shown], dtype=np.int64)
    images = source.fetch(indices, None)["images"]
    kept = _kept(found.pairs, len(source.facts["classes"]))
    told = {
        "classes": source.facts["classes"],
        "pairs": [[label, predicted, kept[label, predicted]] for label, predicted in sorted(kept)],
        "samples_left_out": found.pairs.total() - kept.total(),
        "spread": [row._asdict() for row in found.spread],
        "mistakes": [row._asdict() for row in found.mistakes],
    }
    for row, image in zip(shown, images, strict=True):
        pixels = image[0] if len(image) != 3 else image.permute(1, 2, 0)
        picture = Image.fromarray(pixels.numpy())
        picture.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
        picture.save(folder / f"{row.sample}.png")
    (folder / run_folder.PREDICTIONS_TOLD).write_text(json.dumps(told) + "\n")


def _kept(pairs: Counter[tuple[int, int]], num_classes: int) -> Counter[tuple[int, int]]:
    """The pairs that are written down."""
    if num_classes <= _ALL_PAIRS_CLASSES:
        return pairs
    wrong = sorted(((-count, pair) for pair, count in pairs.items() if pair[0] != pair[1]))[:_MOST_PAIRS]
    return Counter(
        {pair: pairs[pair] for pair in [*((label, label) for label in range(num_classes)), *(pair for _, pair in wrong)]}
    )


def image_of(file: Path, facts: Mapping[str, Any], *, resize_size: int | None) -> Tensor:
    """Return the picture in a file as the model sees it, uint8 [C, H, W]. Raises DataError if it cannot be decoded."""
    picture = decode(content_of(file), channels=facts["channels"], name=str(file))
    height, width = facts["image_size"]
    if height == width:
        return Framing(image_size=height, resize_size=resize_size).fixed(picture)
    return resize(picture, (height, width))


def likeliest(logits: Tensor, classes: list[str], *, top: int) -> tuple[str, dict[str, Any]]:
    """Return the `top` likeliest classes of logits [K] with their probabilities, in words and as JSON holds them."""
    probabilities, best = logits.softmax(dim=0).topk(min(top, len(classes)))
    names, shares = [classes[index] for index in best.tolist()], probabilities.tolist()
    words = "  ".join(f"{name} {share:.3f}" for name, share in zip(names, shares, strict=True))
    return words, {"classes": names, "probabilities": shares}


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
