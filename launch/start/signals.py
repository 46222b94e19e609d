"""Passes a signal to the ranks of a run. They then save and stop after a step that all agree upon.

What stands between would end them, or itself: `accelerate launch` of one process dies and leaves it alone, torchrun ends its
processes after some seconds and itself with exit code 1, srun ends the step at once. Facts: accelerate 1.15, torch 2.15,
Slurm 22.05.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Those that are passed on."""

PassOn = Callable[[int, int], None]
"""Passes a signal on: takes the id of the process that was started, and the signal."""

_PROCESSES = Path("/proc")
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
    for process in list(_ranks(pid)) or [pid]:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _ranks(launcher: int) -> Iterator[int]:
    """Children that run the same interpreter, so no nvidia-smi. Without /proc (macOS) none is found."""
    for folder in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher and (folder / "exe").readlink() == (_PROCESSES / str(launcher) / "exe").readlink():
                yield int(folder.name)


def kill_all_with(mark: str) -> int:
    """End every process whose environment holds `mark`, as `NAME=VALUE`, at once; return how many there were.

    Until none is left: one may have started another meanwhile. Without /proc (macOS) none is found.
    """
    killed: set[int] = set()
    while left := set(_with(mark)) - killed:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
    return len(killed)


def _with(mark: str) -> Iterator[int]:
    for folder in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end_with_parent() -> None:
    """Have this process told SIGTERM when its parent ends: for srun, which then ends its step. Linux only; prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
