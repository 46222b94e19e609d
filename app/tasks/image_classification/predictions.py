"""Predictions on an evaluated split: what a run writes of them, and what the page of `samerun report` shows. Without torch.

test_predictions/predictions.json   classes, counts of label and prediction, and what the images show
test_predictions/SAMPLE.png         an image of the split, at most 72 pixels wide and high
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.errors import RunFolderError
from app.runs import run_folder

if TYPE_CHECKING:
    from torch import Tensor

    from app.tasks.image_classification.data.images import Images

TEMPLATE = Path(__file__).with_name("predictions.html.jinja")
_SPREAD_IMAGES, _MISTAKEN_IMAGES = 6, 6
_IMAGE_SIDE = 72
"""Pixels. 12 images of noise, the worst case for compression, take less than 200 kB."""
_ALL_PAIRS_CLASSES, _MOST_PAIRS = 100, 1000
"""Up to this many classes every pair of label and prediction is recorded; beyond, only the most frequent mistakes."""
_MOST_MISTAKES = 10


def write(folder: Path, images: Images, rows: Tensor) -> None:
    """Write the counts of a split's predictions, and some of its images, into a folder.

    `rows` is float64 [N, 3]: label, predicted class, and its probability. The images are some spread evenly over the split, and
    the mistakes of which the model was most certain, in this order. Raises DataError if one cannot be read.
    """
    from app.tasks.image_classification.data.decoding import as_pillow
    from app.tasks.image_classification.data.images import spread

    labels, predicted = rows[:, 0].long(), rows[:, 1].long()
    probabilities = rows[:, 2].round(decimals=3)  # the last bits differ between topologies
    wrong = (labels != predicted).nonzero()[:, 0]
    mistakes = wrong[probabilities[wrong].argsort(descending=True, stable=True)[:_MISTAKEN_IMAGES]].tolist()
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    kept, num_classes = pairs, len(images.facts["classes"])
    if num_classes > _ALL_PAIRS_CLASSES:
        confused = sorted(((-count, pair) for pair, count in pairs.items() if pair[0] != pair[1]))[:_MOST_PAIRS]
        right = ((label, label) for label in range(num_classes))
        kept = Counter({pair: pairs[pair] for pair in [*right, *(pair for _, pair in confused)]})

    def row(sample: int) -> dict[str, Any]:
        predictions = {"label": int(labels[sample]), "predicted": int(predicted[sample])}
        return {"sample": sample, **predictions, "probability": float(probabilities[sample])}

    shown = {"spread": spread(len(rows), _SPREAD_IMAGES), "mistakes": mistakes}
    content = {
        "classes": images.facts["classes"],
        "pairs": [[*pair, kept[pair]] for pair in sorted(kept)],
        "samples_left_out": pairs.total() - kept.total(),
        **{name: [row(sample) for sample in samples] for name, samples in shown.items()},
    }
    samples = np.array(list(dict.fromkeys(shown["spread"] + shown["mistakes"])), dtype=np.int64)
    for sample, pixels in zip(samples.tolist(), images.fetch(samples, None)["images"], strict=True):
        image = as_pillow(pixels)
        image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
        image.save(folder / f"{sample}.png")
    (folder / run_folder.PREDICTIONS).write_text(json.dumps(content) + "\n")


@dataclass(frozen=True, kw_only=True)
class PredictionSummary:
    """Predictions on a split."""

    split: str
    classes: Sequence[str]
    counts: Mapping[tuple[int, int], int]
    """Samples by label and predicted class; of many classes only the most frequent mistakes are known."""
    left_out: int
    """Samples that are in none of the counts."""
    spread: Sequence[Mapping[str, Any]]
    mistakes: Sequence[Mapping[str, Any]]
    """Images of the split, and what the model predicted, for the template."""

    @property
    def confusion(self) -> list[tuple[str, list[tuple[str, int, float]]]] | None:
        """Rows of the confusion matrix: a label; each prediction, its samples and their share. None if not all are known."""
        if self.left_out:
            return None
        rows = []
        for label, name in enumerate(self.classes):
            counts = [self.counts.get((label, predicted), 0) for predicted in range(len(self.classes))]
            pairs, total = zip(self.classes, counts, strict=True), sum(counts) or 1
            rows.append((name, [(predicted, count, count / total) for predicted, count in pairs]))
        return rows

    @property
    def frequent_mistakes(self) -> list[tuple[str, str, int]]:
        """Label, prediction and count of the most frequent mistakes, in that order."""
        wrong = sorted((-count, pair) for pair, count in self.counts.items() if pair[0] != pair[1] and count)
        return [(self.classes[pair[0]], self.classes[pair[1]], -count) for count, pair in wrong[:_MOST_MISTAKES]]


def read(folder: Path) -> PredictionSummary | None:
    """Return the predictions of the run in `folder`; None if there are none. Raises RunFolderError if they cannot be read."""
    paths = {split: folder / run_folder.predictions(split) / run_folder.PREDICTIONS for split in ("test", "validation")}
    split, path = next(((split, path) for split, path in paths.items() if path.exists()), ("", folder))
    if not split:
        return None
    content = run_folder.read_json(path)
    try:
        classes = [str(name) for name in content["classes"]]
        counts = {(int(label), int(predicted)): int(count) for label, predicted, count in content["pairs"]}
        if not all(0 <= index < len(classes) for pair in counts for index in pair):
            raise ValueError(f"a class is not one of the {len(classes)} in the file")
        return PredictionSummary(
            split=split,
            classes=classes,
            counts=counts,
            left_out=int(content["samples_left_out"]),
            spread=[_shown(path.parent, classes, row) for row in content["spread"]],
            mistakes=[_shown(path.parent, classes, row) for row in content["mistakes"]],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {type(error).__name__}: {error}.") from error


def _shown(place: Path, classes: Sequence[str], row: Mapping[str, Any]) -> Mapping[str, Any]:
    probability, file = float(row["probability"]), place / f"{int(row['sample'])}.png"
    content = file.read_bytes() if file.is_file() else b""
    if b"IEND" not in content[-12:]:
        raise RunFolderError(f"{file} is missing or truncated.")
    return {
        "source": "data:image/png;base64," + base64.b64encode(content).decode(),
        "label": classes[row["label"]],
        "predicted": classes[row["predicted"]],
        "certainty": "> 99.9 %" if probability >= 0.9995 else f"{probability:.1%}".replace("%", " %"),
        "is_right": row["label"] == row["predicted"],
    }
