"""Ends a process that hangs, or whose launcher is gone.

A thread in every rank waits for signs of life (`Runtime.alive`). Without one for the time of `--hang-timeout` it writes the
Python stacks of all threads to RUN/stacks/rank-00000.txt and ends the process with the exit code of HangError. All ranks that
wait for a stuck one notice by themselves, and it does, too, unless it was stopped from outside (SIGSTOP, a lost node).

A thread that never lets go of Python's lock stops this one as well: then `faulthandler`, which needs no lock, writes the
stacks to stderr and ends the process with exit code 1. It goes by the clock: a process that was suspended for longer than
the time-out is ended when it is continued.

A process whose launcher is gone gets no more signals, is not restarted, and would share its run folder with a second start.
`Lifeline` watches the process that started this one, if it is a launcher, and under `samerun launch` also the `samerun` above
that. Linux can tell a process of its parent's death by a signal (prctl(2)), which leaves no time for a word and does not reach
further than to the parent: looking twice a second does, and on every Unix.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from app.environment.host import kill_all_with
from app.environment.topology import LAUNCHER
from app.errors import HangError, RunFolderError, leave_with
from app.runs import run_folder
from app.runs.claim import Claim
from app.runs.run_folder import Recorder

if TYPE_CHECKING:  # a process watches before it imports torch
    from app.distributed.runtime import Runtime

_LOOK_EVERY_S = 1.0
_GRACE_S = 5.0
"""Time from writing a rank's stacks to its end. The first that ends takes the others along, which saw the last sign of life up
to a forward pass and an agreement of `control` (a second) later."""


class Watchdog:
    """Watches this process while it is entered as a context."""

    def __init__(self, runtime: Runtime, claim: Claim, recorder: Recorder, *, timeout_s: int) -> None:
        """`timeout_s` must be longer than any step, forward pass of an evaluation and save takes; 0 watches nothing."""
        self._runtime, self._claim, self._recorder, self._timeout_s = runtime, claim, recorder, timeout_s
        self._path = claim.path / run_folder.STACKS / f"rank-{runtime.launched.rank:05d}.txt"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._timeout_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout_s > 0:
            self._over.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        signs, silent_s = -1, 0.0
        while not self._over.is_set():
            # Those that wait for a rank whose lock is kept write their stacks before it ends, and they with it.
            faulthandler.dump_traceback_later(self._timeout_s + _GRACE_S, exit=True)
            silent_s = silent_s + _LOOK_EVERY_S if self._runtime.signs_of_life == signs else 0.0
            signs = self._runtime.signs_of_life
            if silent_s >= self._timeout_s:
                self._end()
            self._over.wait(_LOOK_EVERY_S)

    def _end(self) -> None:
        """Write the stacks and end this process, with what it started: a worker that is stuck would outlive it."""
        rank, silence = self._runtime.launched.rank, f"no sign of life for {self._timeout_s} s after step {self._runtime.step}"
        try:
            self._write_stacks(f"rank {rank} on {socket.gethostname()}, process {os.getpid()}: {silence}")
            where = f"the stacks of its threads are in {self._path}, those of the other ranks next to it"
        except RunFolderError as error:
            where = f"its stacks could not be written: {error}"
        if self._over.wait(_GRACE_S):
            return
        end_children()
        cause = "The cause is the rank that is in no collective operation, or has no file there; the others wait for it"
        hang = HangError(f"{silence}: {where}. {cause}. If steps or saves really take this long, raise --hang-timeout.")
        self._recorder.record(hang, rank=rank)
        leave_with(hang, rank)

    def _write_stacks(self, headline: str) -> None:
        """Write the stacks below earlier ones. Raises RunFolderError."""
        made = self._claim.place / self._path.name
        with self._claim.errors(self._path), made.open("w") as file:
            file.write(self._path.read_text(errors="replace") if self._path.exists() else "")
            file.write(f"{headline}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
            file.flush()
            self._path.parent.mkdir(exist_ok=True)
            made.rename(self._path)


_LOOK_FOR_LAUNCHER_EVERY_S = 0.5
_NOTICE_S = 1.0
"""Time from the loss of the parent to the end. Ctrl-C reaches a launcher and its process together: this one has to learn of it
first."""
_IS_LAUNCHER = re.compile(r"accelerate|torchrun|torch\.distributed\.(run|launch)|torch/distributed/(run|launch)\.py")


class Lifeline:
    """Ends this process, with all that it started, when the launcher that started it is gone."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ` is this process's environment, which names the `samerun launch` above it, if there is one."""
        self._mark = environ.get(LAUNCHER)
        self._is_first = environ.get("LOCAL_RANK", "0") == "0"  # it reports for all on a machine
        self._is_asked_to_stop: Callable[[], bool] = lambda: False
        self._watched: dict[str, psutil.Process | None] = {}
        """Launchers by name; None: already gone."""
        if self._mark:
            self._watched["`samerun launch`"] = None
            with suppress(psutil.NoSuchProcess):
                self._watched["`samerun launch`"] = psutil.Process(int(self._mark.partition("-")[0]))
        with suppress(psutil.Error):  # it has just ended, or is another user's
            parent = psutil.Process().parent()
            if parent and _IS_LAUNCHER.search(" ".join(parent.cmdline())):
                self._watched["`accelerate launch`"] = parent

    def start(self) -> Lifeline:
        """Begin to watch."""
        if self._watched:
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        return self

    def spare_if(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """Let the process continue for as long as this is so: it saves, and then ends by itself."""
        self._is_asked_to_stop = is_asked_to_stop

    def _watch(self) -> None:
        wait = threading.Event().wait
        while (lost := next((name for name, process in self._watched.items() if _is_gone(process)), None)) is None:
            wait(_LOOK_FOR_LAUNCHER_EVERY_S)
        wait(_NOTICE_S if self._is_first else 2 * _NOTICE_S)
        while self._is_asked_to_stop():
            wait(_LOOK_FOR_LAUNCHER_EVERY_S)
        if self._is_first or self._mark:
            ends = "has ended, so the run ends. It can be resumed from its newest checkpoint"
            text = f"samerun: {lost}, which started this run, {ends}"
            # On stderr, or on stdout where that was read by what is gone. Past Python's files, which a stuck thread may hold.
            for descriptor in (2, 1):
                with suppress(OSError):
                    os.write(descriptor, f"{text}\n".encode())
                    break
        if self._mark:  # all of this machine: a launcher that sees this one end would end the others, but not their children
            kill_all_with(LAUNCHER, self._mark)
        end_children()
        os._exit(1)


def _is_gone(process: psutil.Process | None) -> bool:
    """Return whether a process has ended; a zombie has, whoever has to collect its exit code."""
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


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
