"""Detects a hang: a rank stuck in a collective, in its data loader, or anywhere else.

A thread in every rank waits for signs of life (`Runtime.alive`). Without one for the time of `--hang-timeout` it writes the
Python stacks of all threads to RUN/stacks/rank-00000.txt and ends the process with the exit code of HangError. All ranks that
wait for a stuck one notice by themselves, and it does, too, unless it was stopped from outside (SIGSTOP, a lost node).

A thread that never lets go of Python's lock stops this one as well: then `faulthandler`, which needs no lock, writes the
stacks to stderr and ends the process with exit code 1. It goes by the clock: a process that was suspended for longer than
the time-out is ended when it is continued.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time

from app.errors import HangError, RunFolderError, leave_with
from app.guard.lifeline import end_children
from app.ranks.runtime import Runtime
from app.record import run_folder
from app.record.claim import Claim

_LOOK_EVERY_S = 1.0
_GRACE_S = 5.0
"""From a rank's stacks to its end. The first that ends takes the others along, which saw the last sign of life up to a
forward pass and an agreement of `control` (a second) later."""


class Watchdog:
    """Watches this process while it is entered as a context."""

    def __init__(self, runtime: Runtime, claim: Claim, *, timeout_s: int) -> None:
        """`timeout_s` must be longer than any step, forward pass of an evaluation and save takes; 0 watches nothing."""
        self._runtime, self._claim, self._timeout_s = runtime, claim, timeout_s
        self._path = claim.path / run_folder.STACKS / f"rank-{runtime.launched.rank:05d}.txt"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._runtime.store_watch.stop()  # it watched the start
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
            where = f"the stacks of its threads are in {self._path}, those of the other ranks beside it"
        except RunFolderError as error:
            where = f"its stacks could not be written: {error}"
        if self._over.wait(_GRACE_S):
            return
        end_children()
        cause = "The cause is the rank that is in no collective operation, or has no file there; the others wait for it"
        leave_with(
            HangError(f"{silence}: {where}. {cause}. If steps or saves really take this long, raise --hang-timeout."), rank
        )

    def _write_stacks(self, headline: str) -> None:
        """Write them below those of earlier times. Raises RunFolderError."""
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
