"""Where one process spends its time: the phases of a step, and pauses for evaluation and saving.

Phases end at a lap. On a CPU a lap is read from the host's clock. A GPU works through its queue while the host is ahead of it,
so there a lap is an event in the GPU's own queue (CUDA events: docs.pytorch.org/docs/stable/notes/cuda.html, "Asynchronous
execution"): the time in which it idled for data is then the wait, however long the host was asleep.

Waiting for other ranks is part of the phase in which it happens; `samerun timeline` shows it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Phase = Literal["data_wait", "forward_backward", "optimizer", "other"]
"""`other` is what is in none of the others: counting, logging, agreeing."""
_PHASES: tuple[Phase, ...] = get_args(Phase)
_MOST_PENDING = 512
"""Events that are kept until they are read: a GPU's queue is not longer."""


@dataclass(frozen=True)
class Spent:
    """Seconds of a run, from its start or between two readings."""

    training_s: float
    """All but pauses."""
    held_s: float
    """In which the training was held by saving."""
    phases_s: Mapping[Phase, float]
    """The phases of the steps, on the device: as long together as the training, but for what a GPU has still to do."""

    def __sub__(self, earlier: Spent) -> Spent:
        phases_s = {phase: time_s - earlier.phases_s[phase] for phase, time_s in self.phases_s.items()}
        return Spent(self.training_s - earlier.training_s, self.held_s - earlier.held_s, phases_s)


NOTHING = Spent(0.0, 0.0, dict.fromkeys(_PHASES, 0.0))


class Clock:
    """Seconds of training, by phases, with pauses (evaluation, saving) kept apart."""

    def __init__(self, device: torch.device) -> None:
        self.pause_s = 0.0
        """Length of the last pause."""
        self._held_s, self._spent_s, self._since_s = 0.0, 0.0, time.perf_counter()
        self._laps = _CudaLaps(device) if device.type == "cuda" else _HostLaps()

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    def lap(self, phase: Phase) -> None:
        """End a lap: the time since the last one belongs to this phase."""
        self._laps.end(phase)

    def spent(self) -> Spent:
        """Return the time since the start; the phases up to the last lap. Waits for a GPU to reach it."""
        phases_s = self._laps.total_s()
        return Spent(self.training_s, self._held_s, phases_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training. In a profile it has this name."""
        self.lap("other")
        self._spent_s, start_s = self.training_s, time.perf_counter()
        try:
            with torch.profiler.record_function("paused"):
                yield
        finally:
            self._laps.begin()
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        with self.paused():
            yield
        self._held_s += self.pause_s


class _HostLaps:
    def __init__(self) -> None:
        self._total_s = dict.fromkeys(_PHASES, 0.0)
        self.begin()

    def begin(self) -> None:
        """Begin a lap here: the time before it is in no phase."""
        self._begin_s = time.perf_counter()

    def end(self, phase: Phase) -> None:
        """End a lap, and begin the next."""
        now_s = time.perf_counter()
        self._total_s[phase] += now_s - self._begin_s
        self._begin_s = now_s

    def total_s(self) -> dict[Phase, float]:
        """Return the time of every phase in seconds."""
        return dict(self._total_s)


class _CudaLaps(_HostLaps):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[Any] = []
        self._pending: deque[tuple[Phase | None, Any]] = deque()
        """Events that are not read yet, each with the phase that ends with it."""
        super().__init__()

    def begin(self) -> None:
        self._record(None)

    def end(self, phase: Phase) -> None:
        self._record(phase)

    def total_s(self) -> dict[Phase, float]:
        self._read(leave=1)
        return super().total_s()

    def _record(self, phase: Phase | None) -> None:
        self._read(leave=_MOST_PENDING)
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._pending.append((phase, event))

    def _read(self, *, leave: int) -> None:
        """Read the oldest events, all but `leave`; waits for a GPU that has not reached them."""
        while len(self._pending) > leave:
            begin = self._pending.popleft()[1]
            phase, end = self._pending[0]
            end.synchronize()
            if phase is not None:
                self._total_s[phase] += begin.elapsed_time(end) / 1000
            self._free.append(begin)
