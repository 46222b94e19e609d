"""Predictions of a run on a split (predictions.py writes them), for the page of `samerun report`. Without torch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from app.errors import RunFolderError
from app.runs import run_folder

TEMPLATE = Path(__file__).with_name("predictions.html.jinja")
_NUMBERED_CLASSES = 12
"""Up to this many classes the confusion matrix has its counts in it."""
_MOST_MISTAKES = 10
_SIDE_INCHES = 4.1


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
    """Images of the split, and what the model predicted, for the template; `source` is None if the file cannot be read."""
    complaints: Sequence[str]

    @property
    def confusion(self) -> Figure | None:
        """The confusion matrix: the share of a label's samples, darker where it is more; None if not all counts are known."""
        if self.left_out:
            return None
        size = len(self.classes)
        counts = np.zeros((size, size), np.int64)
        for pair, count in self.counts.items():
            counts[pair] = count
        shares = 100 * counts / counts.sum(1, keepdims=True).clip(1)
        figure = Figure(figsize=(_SIDE_INCHES, 0.84 * _SIDE_INCHES), layout="constrained")
        axes = figure.subplots()
        # The square root shows a mistake of one per cent next to a diagonal of nearly a hundred.
        image = axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
        if size <= _NUMBERED_CLASSES:
            for row, column in np.ndindex(size, size):
                color = "white" if shares[row, column] > 40 else "black"
                axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=7, color=color)
        ticks = list(range(0, size, -(-size // 16)))
        names = [self.classes[tick][:14] for tick in ticks]
        axes.set_xticks(ticks, names, rotation=90, fontsize=8)
        axes.set_yticks(ticks, names, fontsize=8)
        axes.set(xlabel="predicted", ylabel="label")
        bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 5, 10, 25, 50, 100], shrink=0.8)
        bar.set_label("share of the label's samples (%)", fontsize=8)
        return figure

    @property
    def confusion_in_words(self) -> str:
        """What the confusion matrix shows, for readers who cannot see it."""
        right = sum(count for (label, predicted), count in self.counts.items() if label == predicted)
        return f"{len(self.classes)} classes; {right:,} of {sum(self.counts.values()):,} samples are on the diagonal."

    @property
    def frequent_mistakes(self) -> list[tuple[str, str, int]]:
        """Label, prediction and count of the most frequent mistakes, in that order."""
        wrong = sorted((-count, pair) for pair, count in self.counts.items() if pair[0] != pair[1] and count)
        return [(self.classes[pair[0]], self.classes[pair[1]], -count) for count, pair in wrong[:_MOST_MISTAKES]]


def read(folder: Path) -> PredictionSummary | None:
    """Return the predictions of the run in `folder`; None if there are none. Raises RunFolderError if they cannot be read."""
    places = {split: folder / run_folder.predictions(split) for split in ("test", "validation")}
    split = next((name for name, place in places.items() if (place / run_folder.PREDICTIONS_TOLD).exists()), None)
    if split is None:
        return None
    path = places[split] / run_folder.PREDICTIONS_TOLD
    content = run_folder.read_json(path)
    try:
        classes = [str(name) for name in content["classes"]]
        spread, mistakes = ([_shown(path.parent, classes, row) for row in content[key]] for key in ("spread", "mistakes"))
        counts = {(int(label), int(predicted)): int(count) for label, predicted, count in content["pairs"]}
        left_out = int(content["samples_left_out"])
        if not all(0 <= index < len(classes) for pair in counts for index in pair):
            raise ValueError(f"a class is not one of the {len(classes)} in the file")
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    missing = sum(image["source"] is None for image in (*spread, *mistakes))
    complaints = [f"{missing} of the pictures listed in {path} are missing or unreadable."] if missing else []
    return PredictionSummary(
        split=split,
        classes=classes,
        counts=counts,
        left_out=left_out,
        spread=spread,
        mistakes=mistakes,
        complaints=complaints,
    )


def _shown(place: Path, classes: Sequence[str], row: Mapping[str, Any]) -> Mapping[str, Any]:
    probability = float(row["probability"])
    try:
        content = (place / f"{int(row['sample'])}.png").read_bytes()
    except OSError:  # counted, and reported
        content = b""
    is_whole = content.startswith(b"\x89PNG\r\n") and b"IEND" in content[-12:]
    return {
        "source": "data:image/png;base64," + base64.b64encode(content).decode() if is_whole else None,
        "label": classes[row["label"]],
        "predicted": classes[row["predicted"]],
        "certainty": "> 99.9 %" if probability >= 0.9995 else f"{probability:.1%}".replace("%", " %"),
        "is_right": row["label"] == row["predicted"],
    }
