"""Progress in the unit of the task, such as tokens: what `Loss.count` counts, if that is not samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from app.task import SAMPLES


class Units:
    """The counts of all steps of a run, exact over all its starts; of samples, which each line has anyway, nothing is said.

    Of a step that was skipped too: it was read and computed like the others.
    """

    def __init__(self, name: str) -> None:
        """`name` is the unit, in the plural."""
        self._name = name
        self._before, self._taken = 0.0, 0.0
        self._untaken: list[float | torch.Tensor] = []

    def end_step(self, total: float | torch.Tensor) -> None:
        """Take in what the passes of a step counted on all ranks; a tensor is a scalar, which nothing waits for yet."""
        self._untaken.append(total)

    def take(self) -> list[float]:
        """Return what each step since the last call counted."""
        counts = [float(total) for total in self._untaken]
        self._untaken = []
        self._taken += sum(counts)
        return counts

    @property
    def seen(self) -> dict[str, float]:
        """What the run has seen so far, by its name in a line."""
        return self._named(seen=_whole(self._total()))

    def rates(self, counted: float, readings: Mapping[str, Any], *, samples: int) -> dict[str, float]:
        """Return the rates of so many units, which came in so many samples, from the `readings` of these."""
        each = counted / samples
        of_samples, of_one = (readings[f"{SAMPLES}_per_s{of}"] for of in ("", "_per_device"))
        return self._named(per_s=each * of_samples, per_s_per_device=each * of_one)

    def result(self, training_s: float, *, steps: int) -> dict[str, float | None]:
        """Return what the result says of a start that took so many steps in this time."""
        rate = (self._total() - self._before) / training_s if steps else None
        return {**self.seen, **self._named(per_s=rate)}

    def state(self) -> float:
        """Return what `load` takes, as JSON holds it."""
        return _whole(self._total())

    def load(self, state: float) -> None:
        """Go on from what a checkpoint has."""
        self._before = self._taken = float(state)

    def _total(self) -> float:
        return self._taken + sum(float(total) for total in self._untaken)

    def _named(self, **values: Any) -> dict[str, Any]:
        return {} if self._name == SAMPLES else {f"{self._name}_{what}": value for what, value in values.items()}


def _whole(value: float) -> float:
    """The value as an int where it is one: counts of up to 2**53 are exact, and look like counts."""
    return int(value) if value.is_integer() else value
