"""Early stopping: ends a run when its validation score has not improved for too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from app.evaluation import Evaluation


def is_better(score: float, best: float | None, *, good_end: Literal["max", "min"]) -> bool:
    """Whether a score is better than the best before; None: there was none. A score that is not a number never is."""
    if best is None:
        return score == score  # noqa: PLR0124  (false of NaN alone)
    return score > best if good_end == "max" else score < best


class Patience:
    """Counts evaluations without a gain: part of a run's state, so that a resumed one ends where it would have ended.

    It is told of every evaluation on the validation split, whether a bound is set or not.
    """

    def __init__(self, monitor: tuple[str, Literal["max", "min"]], most: int | None) -> None:
        """`most` evaluations in a row may pass without a gain (the last of them ends the run); None: any number."""
        (self._monitored, self._good_end), self._most = monitor, most
        self._best: float | None = None
        self._without_gain = 0

    def see(self, scores: Evaluation | None) -> None:
        """Take in the scores of an evaluation, if there was one: they are the same on all ranks."""
        if scores is None:
            return
        score = scores.scores[self._monitored]
        if is_better(score, self._best, good_end=self._good_end):
            self._best, self._without_gain = score, 0
        else:
            self._without_gain += 1

    @property
    def is_out(self) -> bool:
        """Whether the run is to end."""
        return self._most is not None and self._without_gain >= self._most

    @property
    def why(self) -> str:
        """Why the run ends, in words."""
        best = "no score was a number" if self._best is None else f"the best is {self._best:.6g}"
        return (
            f"{self._without_gain} evaluations in a row did not improve the validation {self._monitored} ({best}), and "
            f"train.stop_after_evaluations_without_gain is {self._most}"
        )

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, as JSON holds it."""
        return {"best": self._best, "without_gain": self._without_gain}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up the state of a checkpoint; None: it has none."""
        if state is not None:
            self._best, self._without_gain = state["best"], state["without_gain"]
