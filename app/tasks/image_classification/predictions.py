"""Predictions: of single images, counts and images of an evaluated split, and samples of an augmented batch.

test_predictions/predictions.json   classes, counts of label and prediction, and what the images show
test_predictions/SAMPLE.png         an image of the split, at most 72 pixels wide and high
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from app.runs import run_folder
from app.tasks.image_classification.data.decoding import Framing, as_picture, content_of, decode, resize
from app.tasks.image_classification.data.images import Images, spread

_SPREAD_PICTURES, _MISTAKEN_PICTURES = 6, 6
_PICTURE_SIDE = 72
"""Pixels. 12 pictures of noise, the worst case for compression, take less than 200 kB."""
_ALL_PAIRS_CLASSES, _MOST_PAIRS = 100, 1000
"""Up to this many classes every pair of label and prediction is recorded; beyond, only the most frequent mistakes."""


def write(folder: Path, images: Images, rows: Tensor) -> None:
    """Write the counts of a split's predictions, and some of its images, into a folder.

    `rows` is float64 [N, 3]: label, predicted class, and its probability. The images are some spread evenly over the split, and
    the mistakes of which the model was most certain, in this order. Raises DataError if one cannot be read.
    """
    labels, predicted = rows[:, 0].long(), rows[:, 1].long()
    probabilities = rows[:, 2].round(decimals=3)  # the last bits differ between topologies
    wrong = (labels != predicted).nonzero()[:, 0]
    mistakes = wrong[probabilities[wrong].argsort(descending=True, stable=True)[:_MISTAKEN_PICTURES]].tolist()
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    kept, num_classes = pairs, len(images.facts["classes"])
    if num_classes > _ALL_PAIRS_CLASSES:
        confused = sorted(((-count, pair) for pair, count in pairs.items() if pair[0] != pair[1]))[:_MOST_PAIRS]
        right = ((label, label) for label in range(num_classes))
        kept = Counter({pair: pairs[pair] for pair in [*right, *(pair for _, pair in confused)]})

    def row(sample: int) -> dict[str, Any]:
        predictions = {"label": int(labels[sample]), "predicted": int(predicted[sample])}
        return {"sample": sample, **predictions, "probability": float(probabilities[sample])}

    shown = {"spread": spread(len(rows), _SPREAD_PICTURES), "mistakes": mistakes}
    content = {
        "classes": images.facts["classes"],
        "pairs": [[*pair, kept[pair]] for pair in sorted(kept)],
        "samples_left_out": pairs.total() - kept.total(),
        **{name: [row(sample) for sample in samples] for name, samples in shown.items()},
    }
    samples = np.array(list(dict.fromkeys(shown["spread"] + shown["mistakes"])), dtype=np.int64)
    for sample, pixels in zip(samples.tolist(), images.fetch(samples, None)["images"], strict=True):
        picture = as_picture(pixels)
        picture.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
        picture.save(folder / f"{sample}.png")
    (folder / run_folder.PREDICTIONS_TOLD).write_text(json.dumps(content) + "\n")


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


_TILE_SIDE, _MARGIN, _LINE = 96, 4, 14
"""Size of a sample in a grid, space between samples, and height of a line of text in Pillow's own font, in pixels."""


def grid(pixels: Tensor, texts: Sequence[str]) -> np.ndarray:
    """Return an image, uint8 [H, W, 3]: samples, uint8 [n, C, H, W], side by side, each over its text."""
    columns = math.ceil(math.sqrt(len(texts)))
    rows = math.ceil(len(texts) / columns)
    width, height = _TILE_SIDE + _MARGIN, _TILE_SIDE + _LINE + _MARGIN
    whole = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), "white")
    for position, (sample, text) in enumerate(zip(pixels, texts, strict=True)):
        tile = Image.new("RGB", (_TILE_SIDE, _TILE_SIDE + _LINE), "white")  # which cuts off a long text
        tile.paste(ImageOps.contain(as_picture(sample).convert("RGB"), (_TILE_SIDE, _TILE_SIDE), Image.Resampling.NEAREST))
        ImageDraw.Draw(tile).text((0, _TILE_SIDE), text, fill="black")
        row, column = divmod(position, columns)
        whole.paste(tile, (_MARGIN + column * width, _MARGIN + row * height))
    return np.asarray(whole)


def text_of(target: Tensor, classes: Sequence[str]) -> str:
    """Return the class of a sample, or the two that it is mixed from with their shares."""
    if target.ndim == 0:
        return classes[int(target)]
    shares, numbers = target.topk(2)
    names = [classes[int(number)] for number in numbers]
    if shares[1] < 0.005:
        return names[0]
    return " + ".join(f"{name} {share:.0%}" for name, share in zip(names, shares.tolist(), strict=True))
