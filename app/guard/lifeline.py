"""Ends a process of a run when the process that started it is gone, for example killed for lack of memory.

Nobody would tell it of a signal any more, start it again, or see how it ends; and a second start would share its run folder.
What is watched is the process that started this one, if it is a launcher, and under `samerun launch` also the `samerun` above
that. Linux can tell a process of its parent's death by a signal (prctl(2)), which leaves no time for a word and does not reach
further than to the parent: looking twice a second does, and on every Unix.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from app.place.environment import LAUNCHER
from app.place.processes import kill_all_with

_LOOK_EVERY_S = 0.5
_NOTICE_S = 1.0
"""From the loss to the end. Ctrl-C reaches a launcher and its process together: this one has to learn of it first."""
_IS_LAUNCHER = re.compile(r"accelerate|torchrun|torch\.distributed\.(run|launch)|torch/distributed/(run|launch)\.py")


class Lifeline:
    """Ends this process, with all that it started, when what started it is gone."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ` is this process's environment, which names the `samerun launch` above it, if there is one."""
        self._mark = environ.get(LAUNCHER)
        self._is_first = environ.get("LOCAL_RANK", "0") == "0"  # it speaks for all on a machine
        self._is_asked_to_stop: Callable[[], bool] = lambda: False
        me = psutil.Process()
        above = [me, *me.parents()]
        pids = [process.pid for process in above]
        self._launcher = int(self._mark.partition("-")[0]) if self._mark else None
        watched = 0
        if self._launcher in pids:
            watched = pids.index(self._launcher)
        elif len(above) > 1 and _IS_LAUNCHER.search(_command_line(above[1])):
            watched = 1
        # Each process that is watched, with what its parent must be.
        self._links = list(zip(above, pids[1 : watched + 1], strict=False))
        self._was_lost_before = self._launcher is not None and self._launcher not in pids

    def start(self) -> Lifeline:
        """Begin to watch."""
        if self._links or self._was_lost_before:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def spare_if(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Let the process go on for as long as this is so: it saves, and then ends by itself."""
        self._is_asked_to_stop = is_asked_to_stop

    def _watch(self) -> None:
        wait = threading.Event().wait
        while (lost := self._lost()) is None:
            wait(_LOOK_EVERY_S)
        wait(_NOTICE_S if self._is_first else 2 * _NOTICE_S)
        while self._is_asked_to_stop():
            wait(_LOOK_EVERY_S)
        if self._is_first or self._mark:
            _say(
                f"samerun: {lost}, which started this run, has ended, so the run ends. It can be resumed from "
                "its newest checkpoint"
            )
        if self._mark:  # all of this machine: a launcher that sees this one end would end the others, but not their children
            kill_all_with(LAUNCHER, self._mark)
        end_children()
        os._exit(1)

    def _lost(self) -> str | None:
        """What is gone, if anything is."""
        if self._was_lost_before:
            return "`samerun launch`"
        for process, parent in self._links:
            try:
                if process.ppid() == parent:
                    continue
            except psutil.Error:
                pass
            return "`samerun launch`" if parent == self._launcher else "`accelerate launch`"
        return None


def end_workers() -> None:
    """Kill the workers that make batches, before this process ends with an error, whose traceback keeps them.

    Python would send them SIGTERM, which they ignore (app/data/loader.py), and wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes the end of a worker for one more error
    for worker in multiprocessing.active_children():
        worker.kill()


def end_children() -> None:
    """Kill all that this process started, data loading workers for instance, and what those started."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended, or is somebody else's
        return ""


def _say(text: str) -> None:
    """On stderr, or on stdout where that was read by what is gone. Past Python's files, which a stuck thread may hold."""
    for descriptor in (2, 1):
        with suppress(OSError):
            os.write(descriptor, f"{text}\n".encode())
            return
