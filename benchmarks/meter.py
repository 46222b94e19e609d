"""The clock of a program that takes turns with others: it runs a window of steps, and waits until it is its turn again.

A step is told by the network: the meter counts the forward passes of its training mode, through a hook that costs every program
the same few microseconds, whoever owns the training loop. What is measured of a window are the seconds of CPU time of the
process (all its threads), the seconds of wall-clock time, and the CPU time of the processes that it started.

Where worker processes make the batches, they go on while the program waits for its turn, until all that may lie ready does. So
a window's answer comes when they rest, for else they would take the cores of whose turn is next; and a window begins with steps
that are not measured, which use up what lay ready. What is measured was then made in the program's own time: batches are
counted where they are made and where they are used, and what a window used of those made before is told with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

_LOOK_EVERY_S = 0.5
_REST_SHARE = 0.05
"""Workers that wait look around every some seconds; one that decodes takes all of a core."""


@dataclass(frozen=True)
class Moment:
    """What the clocks of a process show."""

    cpu_s: float
    wall_s: float

    @classmethod
    def now(cls) -> Moment:
        """Read them when an accelerator, if there is one, has done all that it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return cls(time.process_time(), time.perf_counter())


@dataclass(frozen=True)
class Workers:
    """The processes that make a program's batches."""

    ready: int
    """Batches that may lie ready for it at most."""
    made: Callable[[], int]
    """Returns how many were begun so far."""


class Meter:
    """Measures the program in whose process it is, as the other end of its connection says.

    It is told a number of steps, and answers when they are taken; when nobody is left to tell it, it ends the process. Its
    first answer, to nothing, comes before the second step, and tells the CPU time that the process took until then.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 2
        self._start: Moment | None = None
        self._steps, self._leads_in = 0, False
        self._workers: Workers | None = None
        self._workers_cpu_s = 0.0
        self._taken = self._made_before = self._left_over = 0

    def expect(self, workers: Workers) -> None:
        """Measure a program that is fed by workers."""
        self._workers = workers

    def watch(self, model: torch.nn.Module) -> None:
        """Count the forward passes of `model`, which has to be the module that is called in each step."""
        model.register_forward_pre_hook(self._count)

    def _count(self, model: torch.nn.Module, _inputs: Any) -> None:
        if model.training:
            self._left -= 1
            self._taken += 1
            if self._left == 0 and self._leads_in:
                self._begin_window()
            elif self._left == 0:
                self._end_window()

    def _begin_window(self) -> None:
        self._left, self._leads_in = self._steps, False
        if self._workers is not None:
            self._workers_cpu_s, self._left_over = _children_cpu_s(), max(0, self._made_before - self._taken)
        self._start = Moment.now()

    def _end_window(self) -> None:
        end = Moment.now()
        start = self._start or Moment(0.0, end.wall_s)
        before_s, self._workers_cpu_s = self._workers_cpu_s, _children_cpu_s()
        figures = {"cpu_s": end.cpu_s - start.cpu_s, "wall_s": end.wall_s - start.wall_s}
        figures |= {"children_cpu_s": self._workers_cpu_s - before_s, "left_over": self._left_over}
        if self._workers is not None:
            _await_rest()
        try:
            self._connection.send(figures)
            self._steps = self._connection.recv()
        except (EOFError, ConnectionError):
            # The command is gone. Libraries that own the loop would catch an exception, and a process group wait for its peers.
            os._exit(1)
        if self._workers is None:
            self._begin_window()
        else:
            self._left, self._leads_in, self._made_before = self._workers.ready, True, self._workers.made()


def _await_rest() -> None:
    """Wait until the processes that this one started use next to no CPU time."""
    before_s = _children_cpu_s()
    while True:
        time.sleep(_LOOK_EVERY_S)
        now_s = _children_cpu_s()
        if now_s - before_s < _REST_SHARE * _LOOK_EVERY_S:
            return
        before_s = now_s


def _children_cpu_s() -> float:
    """CPU time so far of the living processes that this one started: workers fill their queues between two windows, too."""
    total_s = 0.0
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total_s += times.user + times.system
    return total_s
