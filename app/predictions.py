"""What was mistaken for what: the confusion counts of the last evaluation and some of the pictures, left in the run folder.

test_predictions/predictions.json   classes, counts of label and prediction, and what the pictures show
test_predictions/SAMPLE.png         a test picture, at most 72 pixels wide and high
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from app.data.source import Source, spread
from app.ranks.runtime import Runtime
from app.record import run_folder
from app.record.claim import Claim
from app.scores import Evaluation

_SPREAD_PICTURES, _MISTAKEN_PICTURES = 6, 6
_PICTURE_SIDE = 72
"""Pixels. 12 pictures of noise, which nothing compresses, are less than 200 kB."""
_ALL_PAIRS_CLASSES, _MOST_PAIRS = 100, 1000
"""Up to so many classes every pair of label and prediction is written down, of more the most frequent mistakes alone."""


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


def predictions(runtime: Runtime, scores: Evaluation, size: int) -> Predictions:
    """Return what a model, of which these are the scores, made of the `size` samples. All ranks call it and get the same.

    What they exchange is never more than a number for each sample or each pair of classes, whichever are fewer.
    """
    own = scores.own[:, scores.own[0] >= 0].cpu()
    own[3] = own[3].round(decimals=3)
    pairs, counts = own[1:3].long().unique(dim=1, return_counts=True)
    chosen = own[:, torch.isin(own[0].long(), torch.tensor(spread(size, _SPREAD_PICTURES)))]
    wrong = own[:, own[1] != own[2]]
    surest = wrong[:, wrong[3].argsort(descending=True, stable=True)[:_MISTAKEN_PICTURES]]
    ranks = runtime.gather((Counter(dict(zip(_tuples(pairs), counts.tolist(), strict=True))), _rows(chosen), _rows(surest)))
    mistakes = sorted((row for *_, rows in ranks for row in rows), key=lambda row: (-row.probability, row.sample))
    return Predictions(
        pairs=sum((pairs for pairs, *_ in ranks), Counter()),
        spread=sorted(row for _, rows, _ in ranks for row in rows),
        mistakes=mistakes[:_MISTAKEN_PICTURES],
    )


def _tuples(columns: torch.Tensor) -> list[tuple[int, int]]:
    return [(label, predicted) for label, predicted in columns.T.tolist()]


def _rows(columns: torch.Tensor) -> list[Prediction]:
    return [Prediction(int(sample), int(label), int(said), sure) for sample, label, said, sure in columns.T.tolist()]


def write_predictions(claim: Claim, source: Source, found: Predictions) -> None:
    """Write what was found on `source` into the run folder: the counts, and the pictures.

    Raises DataError if a picture is gone, and RunFolderError.
    """
    shown = list(dict.fromkeys(found.spread + found.mistakes))
    indices = np.array([row.sample for row in shown], dtype=np.int64)
    images = source.fetch(indices, None)["images"]
    kept = _kept(found.pairs, len(source.classes))
    told = {
        "classes": source.classes,
        "pairs": [[label, predicted, kept[label, predicted]] for label, predicted in sorted(kept)],
        "samples_left_out": found.pairs.total() - kept.total(),
        "spread": [row._asdict() for row in found.spread],
        "mistakes": [row._asdict() for row in found.mistakes],
    }
    with claim.staged(run_folder.PREDICTIONS) as folder:
        folder.mkdir()
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
