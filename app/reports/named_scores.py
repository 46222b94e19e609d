"""What a run is judged by, as people read it: its scores by their names, and their values in words.

A score of a split is `validation_NAME` or `test_NAME` in evaluations.jsonl and result.json; that of the training data is
NAME in metrics.jsonl. A run is judged by its validation score while it goes on; the test score is that of its end.
Which scores there are is the task's affair: here one is a name and a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.files.lines import is_finite
from app.reports.past_run import PastRun

LOSS = "loss"
SPLITS = ("validation", "test")
FOLLOWED = ("bits_per_byte",)
"""Scores that are followed wherever they are recorded: of all of a text's, the one that other tokenizers can be compared by."""
_SAMPLES = tuple(f"{split}_samples" for split in SPLITS)
"""No scores, but of how many samples the others are."""


def key_of(split: str, quantity: str) -> str:
    """Return what a quantity is called where it is of a split."""
    return f"{split}_{quantity}"


def quantities(runs: Iterable[PastRun]) -> list[str]:
    """Return what is followed over the course of the runs: the loss, the score by which each is judged, those of FOLLOWED."""
    runs = list(runs)
    there = {key for run in runs for line in run.evaluations for key in line}
    followed = [name for name in FOLLOWED if any(key_of(split, name) in there for split in SPLITS)]
    return list(dict.fromkeys([LOSS, *(run.monitor[0] for run in runs if run.monitor), *followed]))


def scores(run: PastRun, line: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a line of evaluations or a result, those of a split first by which the run is judged."""
    first = [key_of(split, run.monitor[0]) for split in SPLITS] if run.monitor else []
    keys = [key for key in dict.fromkeys([*first, *line]) if split_of(key) and key not in _SAMPLES]
    return {key: line[key] for key in keys if is_finite(line.get(key))}


def split_of(key: str) -> str | None:
    """Return the split that a score is of, by its name in a line; None: it is no score of a split."""
    return next((split for split in SPLITS if key.startswith(f"{split}_")), None)


def last_scores(run: PastRun) -> dict[str, float]:
    """Return the scores of the final weights, or else those of the last evaluation."""
    return scores(run, run.result) or scores(run, next(reversed(run.evaluations), {}))


def words(key: str) -> str:
    """Return the name of a score, of a line or a result, in words: `test top5 accuracy`."""
    return key.replace("_", " ")


def heading(text: str) -> str:
    """Return it with a capital letter; a name keeps its own."""
    return text[:1].upper() + text[1:]


def is_share(key: str, values: Iterable[float]) -> bool:
    """Return whether these values of a score are shown in per cent: those of an accuracy that lie in 0..1."""
    return key.endswith("accuracy") and all(0.0 <= value <= 1.0 for value in values)


def value_text(key: str, value: float, values: Sequence[float] = ()) -> str:
    """Return a value of a score in words; `values` are all that stand beside it, where there are others."""
    if is_share(key, (value, *values)):
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"
