"""Exact evaluation: every sample counts exactly once, on any number of processes.

The ranks get equal shares because padding fills them up; padded samples have weight 0, and what is added up over the ranks
are counts and sums, never means. What was mistaken for what, and some of the pictures, are left in the run folder at its end:

    test_predictions/predictions.json   classes, counts of label and prediction, and what the pictures show
    test_predictions/SAMPLE.png         a test picture, at most 72 pixels wide and high
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from app import run_folder
from app.data.augment import Preparation
from app.data.loader import Batch, Failure, batches_of
from app.data.source import Source, spread
from app.errors import DataError
from app.runtime import Runtime

_SPREAD_PICTURES, _MISTAKEN_PICTURES = 6, 6
_PICTURE_SIDE = 72
"""Pixels. 12 pictures of noise, which nothing compresses, are less than 200 kB."""
_ALL_PAIRS_CLASSES, _MOST_PAIRS = 100, 1000
"""Up to so many classes every pair of label and prediction is written down, of more the most frequent mistakes alone."""


@dataclass(frozen=True)
class Evaluation:
    """What a model scores on a data set."""

    samples: int
    """Samples counted."""
    accuracy: float
    """Share of the samples whose most likely class is right, 0..1."""
    top5_accuracy: float
    """Share of the samples whose class is among the five most likely, 0..1."""
    loss: float
    """Mean cross-entropy of a sample, in nats."""
    class_accuracy: tuple[float | None, ...]
    """Accuracy on the samples of each class; None for a class without samples."""
    own: torch.Tensor = field(compare=False, repr=False)
    """float64 [4, samples of this rank]: index (-1 is padding), label, predicted class, and its probability 0..1."""

    def as_metrics(self) -> dict[str, float]:
        """Return the scores by the names they have in the run folder."""
        return {"test_accuracy": self.accuracy, "test_top5_accuracy": self.top5_accuracy, "test_loss": self.loss}


@torch.no_grad()
def evaluate(
    runtime: Runtime,
    model: torch.nn.Module,
    loader: Iterable[Batch | Failure],
    preparation: Preparation,
    *,
    size: int,
    num_classes: int,
) -> Evaluation:
    """Return the scores of `model` on the `size` samples of a prepared `loader`; all ranks call it and get the same.

    Raises DataError if not every sample was counted exactly once.
    """
    was_training = model.training
    runtime.average_buffers(model)
    model.eval()
    # Counts per class: seen, right, right among five; and in the last row the loss. Exact in float64 up to 2**53 samples.
    totals = torch.zeros(4, num_classes, dtype=torch.float64, device=runtime.device)
    own: list[torch.Tensor] = []
    for batch in batches_of(loader):
        runtime.alive()
        labels, weights = batch["labels"], (batch["samples"] >= 0).double()
        logits = model(preparation.evaluate(batch)).double()
        likeliest = logits.topk(min(5, num_classes), dim=1)
        best = likeliest.indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none")
        for total, score in zip(totals, (torch.ones_like(losses), best[:, 0], best.any(dim=1), losses), strict=True):
            total.index_add_(0, labels, score * weights)
        probabilities = (likeliest.values[:, 0] - logits.logsumexp(dim=1)).exp()
        own.append(torch.stack([batch["samples"], labels, likeliest.indices[:, 0], probabilities]))
    model.train(was_training)
    return _scores(runtime.accelerator.reduce(totals, "sum"), size, torch.cat(own, dim=1))


def _scores(totals: torch.Tensor, size: int, own: torch.Tensor) -> Evaluation:
    seen, right, right_of_five, loss = totals.tolist()
    counted = int(sum(seen))
    if counted != size:
        raise DataError(f"the evaluation counted {counted} samples of a data set of {size}: the loader lost or repeated some.")
    return Evaluation(
        samples=counted,
        accuracy=sum(right) / counted,
        top5_accuracy=sum(right_of_five) / counted,
        loss=sum(loss) / counted,
        class_accuracy=tuple(hits / count if count else None for hits, count in zip(right, seen, strict=True)),
        own=own,
    )


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


def write_predictions(run_dir: Path, source: Source, found: Predictions) -> None:
    """Write what was found on `source` into the run folder: the counts, and the pictures. Raises DataError if one is gone."""
    folder = run_dir / run_folder.PREDICTIONS
    folder.mkdir(exist_ok=True)
    shown = list(dict.fromkeys(found.spread + found.mistakes))
    indices = np.array([row.sample for row in shown], dtype=np.int64)
    images, _ = source.fetch(indices, indices)
    for row, image in zip(shown, images, strict=True):
        pixels = image[0] if len(image) != 3 else image.permute(1, 2, 0)
        picture = Image.fromarray(pixels.numpy())
        picture.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
        picture.save(folder / f"{row.sample}.png")
    kept = _kept(found.pairs, len(source.classes))
    told = {
        "classes": source.classes,
        "pairs": [[label, predicted, kept[label, predicted]] for label, predicted in sorted(kept)],
        "samples_left_out": found.pairs.total() - kept.total(),
        "spread": [row._asdict() for row in found.spread],
        "mistakes": [row._asdict() for row in found.mistakes],
    }
    run_folder.write_text(folder / run_folder.PREDICTIONS_TOLD, json.dumps(told) + "\n")


def _kept(pairs: Counter[tuple[int, int]], num_classes: int) -> Counter[tuple[int, int]]:
    """The pairs that are written down."""
    if num_classes <= _ALL_PAIRS_CLASSES:
        return pairs
    wrong = sorted(((-count, pair) for pair, count in pairs.items() if pair[0] != pair[1]))[:_MOST_PAIRS]
    return Counter(
        {pair: pairs[pair] for pair in [*((label, label) for label in range(num_classes)), *(pair for _, pair in wrong)]}
    )
