"""The clock of a program that takes turns with others: it runs a window of steps, and waits until it is its turn again.

A step is told by the network: the meter counts the forward passes of its training mode, through a hook that costs every program
the same few microseconds, whoever owns the training loop. What is measured of a window are the seconds of CPU time of the
process (all its threads), the seconds of wall-clock time, and the CPU time of the processes that it started.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch


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


class Meter:
    """Measures the program in whose process it is, as the other end of its connection says.

    It is told a number of steps, and answers when they are taken; when nobody is left to tell it, it ends the process. Its
    first answer, to nothing, comes before the second step, and tells the CPU time that the process took until then.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 2
        self._start: Moment | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Count the forward passes of `model`, which has to be the module that is called in each step."""
        model.register_forward_pre_hook(self._count)

    def _count(self, model: torch.nn.Module, _inputs: Any) -> None:
        if model.training:
            self._left -= 1
            if self._left == 0:
                self._end_window()

    def _end_window(self) -> None:
        end = Moment.now()
        start = self._start or Moment(0.0, end.wall_s)
        figures = {"cpu_s": end.cpu_s - start.cpu_s, "wall_s": end.wall_s - start.wall_s, "children_cpu_s": _children_cpu_s()}
        try:
            self._connection.send(figures)
            self._left = self._connection.recv()
        except (EOFError, ConnectionError):
            # The command is gone. Libraries that own the loop would catch an exception, and a process group wait for its peers.
            os._exit(1)
        self._start = Moment.now()


def _children_cpu_s() -> float:
    """CPU time so far of the living processes that this one started: workers fill their queues between two windows, too."""
    total_s = 0.0
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total_s += times.user + times.system
    return total_s
