"""Processes of this machine, found by a variable in their environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil


def kill_all_with(variable: str, value: str) -> int:
    """Kill every other process with this variable in its environment; return how many there were.

    Until none is left: one may have started another meanwhile.
    """
    killed: set[int] = set()
    while left := [process for process in _all_with(variable, value) if process.pid not in killed]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            killed.add(process.pid)
    return len(killed)


def _all_with(variable: str, value: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is somebody else's
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                yield process
