"""What a run left of its predictions on the test set (predictions.py writes it), for the page of `samerun report`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from app.errors import RunFolderError
from app.runs import run_folder

TEMPLATE = Path(__file__).with_name("predictions.html.jinja")
_TABLE_CLASSES = 12
"""Up to this many classes the confusion matrix is a table of numbers; beyond, it is a picture."""
_SIDE_INCHES = 4.1


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A test picture, and what the model made of it."""

    source: str | None
    """The PNG file as a data URI; None if the file is gone."""
    label: str
    predicted: str
    certainty: str
    """The probability of the predicted class, as it is said."""
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is left of the predictions on a split."""

    split: str
    """Its name."""
    classes: Sequence[str]
    counts: Mapping[tuple[int, int], int]
    """Samples by label and predicted class, of which many classes have only the most frequent mistakes."""
    left_out: int
    """Samples that are in none of the counts."""
    spread: Sequence[Picture]
    mistakes: Sequence[Picture]
    complaints: Sequence[str]

    @property
    def confusion(self) -> list[list[tuple[int, float]]] | None:
        """Rows of the table: each count, and its share of the row; None where there is too much for a table."""
        every = range(len(self.classes))
        if len(every) > _TABLE_CLASSES:
            return None
        rows = [[self.counts.get((label, said), 0) for said in every] for label in every]
        return [[(count, count / (sum(row) or 1)) for count in row] for row in rows]

    @property
    def picture(self) -> Figure | None:
        """The confusion matrix of many classes; None where it is a table, or not all of it is known."""
        return None if self.left_out or len(self.classes) <= _TABLE_CLASSES else _draw_confusion(self)

    @property
    def told(self) -> str:
        """What the picture shows, for who cannot see it."""
        right = sum(count for (label, said), count in self.counts.items() if label == said)
        return f"{len(self.classes)} classes; {right:,} of {sum(self.counts.values()):,} samples are on the diagonal."

    @property
    def frequent_mistakes(self) -> list[tuple[str, str, int]]:
        """Label, prediction and count of the pairs that were mistaken most, the most frequent first."""
        wrong = sorted((-count, pair) for pair, count in self.counts.items() if pair[0] != pair[1] and count)
        return [(self.classes[label], self.classes[said], -count) for count, (label, said) in wrong]


def read(folder: Path) -> Predicted | None:
    """Return what the run in `folder` left; None if it left nothing. Raises RunFolderError if it cannot be read."""
    places = {split: folder / run_folder.predictions(split) for split in ("test", "validation")}
    split = next((name for name, place in places.items() if (place / run_folder.PREDICTIONS_TOLD).exists()), None)
    if split is None:
        return None
    place = places[split]
    path = place / run_folder.PREDICTIONS_TOLD
    told = run_folder.read_json(path)
    try:
        classes = [str(name) for name in told["classes"]]
        spread, mistakes = ([_picture(place, classes, row) for row in told[name]] for name in ("spread", "mistakes"))
        counts = {(int(label), int(said)): int(count) for label, said, count in told["pairs"]}
        left_out = int(told["samples_left_out"])
        if not all(0 <= index < len(classes) for pair in counts for index in pair):
            raise ValueError(f"a class is not one of the {len(classes)} in the file")
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    gone = sum(picture.source is None for picture in (*spread, *mistakes))
    complaints = [f"{gone} of the pictures listed in {path} are missing or unreadable."] if gone else []
    shown = {"spread": spread, "mistakes": mistakes}
    return Predicted(split=split, classes=classes, counts=counts, left_out=left_out, complaints=complaints, **shown)


def _picture(place: Path, classes: Sequence[str], row: Mapping[str, Any]) -> Picture:
    probability = float(row["probability"])
    return Picture(
        source=_png_uri(_bytes(place / f"{int(row['sample'])}.png")),
        label=classes[row["label"]],
        predicted=classes[row["predicted"]],
        certainty="> 99.9 %" if probability >= 0.9995 else f"{probability:.1%}".replace("%", " %"),
        is_right=row["label"] == row["predicted"],
    )


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # the caller counts them, and says so
        return None


def _png_uri(content: bytes | None) -> str | None:
    """A PNG file as a data URI, which needs no file beside the page; None for what is no PNG."""
    if content is None or not content.startswith(b"\x89PNG\r\n") or b"IEND" not in content[-12:]:
        return None
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _draw_confusion(found: Predicted) -> Figure:
    """The confusion matrix as a picture: the share of a label's samples, darker where it is more."""
    size = len(found.classes)
    totals = [sum(found.counts.get((label, said), 0) for said in range(size)) or 1 for label in range(size)]
    shares = [[100 * found.counts.get((label, said), 0) / totals[label] for said in range(size)] for label in range(size)]
    figure = Figure(figsize=(_SIDE_INCHES, 0.84 * _SIDE_INCHES), layout="constrained")
    axes = figure.subplots()
    # The square root shows a mistake of one per cent beside a diagonal of nearly a hundred.
    image = axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
    every = -(-size // 16)
    ticks = list(range(0, size, every))
    names = [found.classes[tick][:14] for tick in ticks]
    axes.set_xticks(ticks, names, rotation=90, fontsize=8)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.set(xlabel="predicted", ylabel="label")
    bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 5, 10, 25, 50, 100], shrink=0.8)
    bar.set_label("share of the label's samples (%)", fontsize=8)
    return figure
