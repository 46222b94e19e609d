"""Passes a signal to the ranks of a run. They then save and stop after a step that all agree upon.

What stands between would end them, or itself: `accelerate launch` of one process dies and leaves it alone, torchrun ends its
processes after some seconds and itself with exit code 1, srun ends the step at once. Facts: accelerate 1.15, torch 2.15,
Slurm 22.05.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those that are passed on."""

PassOn = Callable[[int, int], None]
"""Passes a signal on: takes the id of the process that was started, and the signal."""

_PR_SET_PDEATHSIG = 1


def to_itself(pid: int, number: int) -> None:
    """Send it to what was started, which sees to the rest (`spread.py`)."""
    os.kill(pid, number)


def to_srun(pid: int, number: int) -> None:
    """Send srun what it forwards to its tasks, in place of what it would end them for.

    A batch script gets SIGTERM from Slurm together with the tasks: these are told twice to stop then, which means the same.
    """
    os.kill(pid, signal.SIGUSR1 if number in (signal.SIGTERM, signal.SIGHUP) else number)


def to_rank(pid: int, number: int) -> None:
    """Send it to the one process that trains, which was started without an `accelerate launch`."""
    os.kill(pid, number)


def to_ranks(pid: int, number: int) -> None:
    """Send it to the processes that an `accelerate launch` has started, or to itself if there are none yet."""
    for process in _ranks(pid) or [pid]:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _ranks(launcher: int) -> list[int]:
    """Children that run the same interpreter, so no nvidia-smi."""
    import psutil  # not at the top: the launcher starts at once

    ranks: list[int] = []
    with suppress(psutil.Error):  # it has just ended
        started = psutil.Process(launcher)
        for child in started.children():
            with suppress(psutil.Error):
                if child.exe() == started.exe():
                    ranks.append(child.pid)
    return ranks


def end_with_parent() -> None:
    """Have this process told SIGTERM when its parent ends: for srun, which then ends its step. Linux only; prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
