"""The confusion counts of the last evaluation and some of its pictures, written into the run folder.

test_predictions/predictions.json   classes, counts of label and prediction, and what the pictures show
test_predictions/SAMPLE.png         a test picture, at most 72 pixels wide and high
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from app.runs import run_folder
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
