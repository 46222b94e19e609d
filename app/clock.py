"""The time of a run, as one of its processes spends it: training, waiting for data, evaluating, saving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """Seconds of training, with pauses (evaluation, saving) kept apart."""

    _since_s: float = field(default_factory=time.perf_counter)
    _spent_s: float = 0.0
    waiting_s: float = 0.0
    """Time the training waited for data."""
    held_s: float = 0.0
    """Time the training was held by saving."""
    pause_s: float = 0.0
    """Length of the last pause."""

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training."""
        self._spent_s, start_s = self.training_s, time.perf_counter()
        try:
            yield
        finally:
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        with self.paused():
            yield
        self.held_s += self.pause_s

    def wait_for(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, counting the time until it is there."""
        start_s = time.perf_counter()
        batch = next(batches)
        self.waiting_s += time.perf_counter() - start_s
        return batch
