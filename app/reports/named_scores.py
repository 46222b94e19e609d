"""What a run is judged by, as people read it: its scores by their names, and their values in words.

A score of the test set is `test_NAME` in evaluations.jsonl and result.json; that of the training data is NAME in metrics.jsonl.
Which scores there are is the task's affair: here one is a name and a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.reports.past_run import PastRun
from app.reports.state import is_number

LOSS = "loss"
_TEST = "test_"
_SAMPLES = "test_samples"
"""No score, but of how many samples the others are."""


def test_key(quantity: str) -> str:
    """Return what a quantity is called where it is of the test set."""
    return f"{_TEST}{quantity}"


def quantities(runs: Iterable[PastRun]) -> list[str]:
    """Return what is followed over the course of the runs: the loss, and the score by which each is judged."""
    judged = [run.monitor[0].removeprefix(_TEST) for run in runs if run.monitor]
    return list(dict.fromkeys([LOSS, *judged]))


def scores(run: PastRun, line: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of the test set in a line of evaluations or a result; the first is that by which the run is judged."""
    first = [run.monitor[0]] if run.monitor else []
    keys = [key for key in dict.fromkeys([*first, *line]) if key.startswith(_TEST) and key != _SAMPLES]
    return {key: line[key] for key in keys if is_number(line.get(key))}


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
