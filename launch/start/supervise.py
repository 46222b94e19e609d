"""Supervises a run from outside: passes signals on, finds out how it failed, returns its exit code, ends its processes.

What stands between would end them, or itself: `accelerate launch` of one process dies and leaves it alone, torchrun ends its
processes after some seconds and itself with exit code 1, srun ends the step immediately. Facts: accelerate 1.15, torch 2.15,
Slurm 22.05.

The error of the process that failed first is printed again, last, and its exit code becomes the run's.

A signal means that the run is to save and stop, which takes its time, and what starts it would not leave it that time: so
`pass_on` sends it past that.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from app.environment import host
from app.environment.topology import LAUNCHER
from app.errors import LackOfMemoryError, printable
from app.runs import run_folder
from app.runs.run_folder import ProcessFailure
from launch.run_module import ACCELERATE, as_shells_say

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on."""
_PR_SET_PDEATHSIG = 1


def pass_on(command: Sequence[str], pid: int, number: int) -> None:
    """Send a signal to what has to save for it: the processes that train, or what passes it on to them.

    srun gets what it forwards to its tasks, in place of what it would end them for. A batch script gets SIGTERM from Slurm
    together with the tasks, which then receive the request to stop twice. An `accelerate launch` that has no processes yet gets
    it itself.
    """
    if command[0] == "srun" and number in (signal.SIGTERM, signal.SIGHUP):
        number = signal.SIGUSR1
    ranks = _ranks(pid) if ACCELERATE in command else []
    for process in ranks or [pid]:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _ranks(launcher: int) -> list[int]:
    """Children that run the same interpreter, so no nvidia-smi."""
    import psutil  # not at the top: the launcher starts immediately

    ranks: list[int] = []
    with suppress(psutil.Error):  # it has just ended
        started = psutil.Process(launcher)
        for child in started.children():
            with suppress(psutil.Error):
                if child.exe() == started.exe():
                    ranks.append(child.pid)
    return ranks


def end_with_parent() -> None:
    """Have this process get SIGTERM when its parent ends: for srun, which then ends its step. Linux only; prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_one_process(command: Sequence[str]) -> bool:
    """Return True for a process that trains without an `accelerate launch` (node_command.py)."""
    return command[0] == "env" and ACCELERATE not in command


def _by_exit_code(command: Sequence[str], code: int, received: Collection[int]) -> ProcessFailure | None:
    """Return the failure of the command, or of a process that it started, but for a signal that came to this process too."""
    number = -code if code < 0 else code - 128
    if number in received:
        return None
    if _is_one_process(command):
        return ProcessFailure(exit_code=code, rank=0)
    if number not in map(int, signal.Signals):
        return None
    if code > 0:  # of a process that a launcher or, on any host, a scheduler's command started
        where = socket.gethostname() if ACCELERATE in command else ""
        return ProcessFailure(exit_code=-number, process="a process", host=where)
    return ProcessFailure(exit_code=code, process="`accelerate launch`" if ACCELERATE in command else Path(command[0]).name)


_LOOK_EVERY_S = 0.2
_STOP_AND_GO_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ECHO_S = 5.0
"""Slurm signals batch script and tasks when a job ends, and the script passes its signal on: one that comes twice within this
time counts once. A process that has saved for it and is about to end may die of the second."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run."""

    exit_code: int
    """For this process to end with, as shells have it: 137 after SIGKILL."""
    signals: Collection[int]
    """Signals that this process got, and gets: they are still received after the end of the run."""
    is_out_of_memory: bool = False
    """Return True if the kernel has killed a process of this job on this machine because memory ran out."""

    @property
    def is_killed_for_memory(self) -> bool:
        """True if the process that ended the run was killed while the kernel killed one because memory ran out."""
        return self.is_out_of_memory and self.exit_code == 128 + signal.SIGKILL

    @property
    def needs_less_memory(self) -> bool:
        """True if the run ended for lack of memory, of a device or of the host."""
        return self.is_killed_for_memory or self.exit_code == LackOfMemoryError.exit_code


class _Command:
    """A command that runs, and the signals that this process gets meanwhile."""

    def __init__(self, command: Sequence[str], resume: str) -> None:
        self.got: list[int] = []
        self._resume = resume
        self._command, self._passed_on_s = command, -math.inf
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._started: subprocess.Popen[bytes] | None = None
        self._terminals = host.terminals()
        for number in _SIGNALS:
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # as after nohup
                signal.signal(number, self._receive)

    @property
    def is_interrupted_twice(self) -> bool:
        return self.got.count(signal.SIGINT) > 1

    def start(self, environment: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
        self._started = subprocess.Popen(
            self._command,
            env={**environment, LAUNCHER: self._mark},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent if self._command[0] == "srun" else None,  # noqa: PLW1509 - there is no other thread
        )
        for early in self.got:  # while it was being started
            self._pass_on(early)
        return self._started

    def end_all(self) -> None:
        """Kill the command, if it runs, and all on this machine that it started and left."""
        if self._started is not None and self._started.poll() is None:
            os.killpg(self._started.pid, signal.SIGKILL)
        host.kill_all_with(LAUNCHER, self._mark)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.got.append(number)
        if number == signal.SIGHUP:
            host.redirect_to_null(self._terminals)
        is_echo = number in _STOP_AND_GO_ON and time.monotonic() - self._passed_on_s < _ECHO_S
        if self._started is not None and self._started.poll() is None and not is_echo:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        assert self._started is not None
        if self.is_interrupted_twice and (ACCELERATE in self._command or _is_one_process(self._command)):
            self.end_all()
            return
        self._passed_on_s = time.monotonic()
        pass_on(self._command, self._started.pid, number)
        if self.got == [signal.SIGINT]:
            _tell("the run saves a checkpoint and stops; press Ctrl-C again to stop it immediately")
        elif number == signal.SIGTERM and self._resume:  # the scheduler may end this process before the run has stopped
            _tell(f"got SIGTERM: the run saves a checkpoint and stops. If the log ends here, resume it: {self._resume}")


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    errors: Path | None = None,
    ends_with_parent: bool = False,
    output: IO[bytes] | None = None,
    resume: str = "",
) -> Ending:
    """Run the command to its end, and pass the signals on that this process gets.

    If it fails, nothing that it started is left on this machine. In `errors` its processes record how they fail.
    `ends_with_parent`: the run ends when the process that started this one does. `output` is the file for stdout and stderr;
    None: this process's own. `resume` is the command that resumes the run, printed when a SIGTERM comes.
    """
    running, kills, parent = _Command(command, resume), host.kills(), os.getppid()
    started = running.start(environment, output)
    while True:
        try:
            code = started.wait(_LOOK_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            if ends_with_parent and os.getppid() != parent:
                _tell("the process that started this has ended, so the run ends")
                running.end_all()
    if code:
        running.end_all()
    if running.is_interrupted_twice and code:
        _tell("stopped immediately, without saving")
        return Ending(exit_code=128 + signal.SIGINT, signals=running.got)
    failed = run_folder.first_failure(errors) if code else None
    if code and failed is None and (failed := _by_exit_code(command, code, running.got)):
        run_folder.record_failure(errors, failed)
    if failed is not None:
        code, text = failed.exit_code, (failed.traceback or failed.error).splitlines()
        if not (text and _is_one_process(command)):  # its error is the last on stderr already
            lines = [f"{failed}, and the run with it" + (":" if text else ""), *(f"[{failed.name}] {line}" for line in text)]
            _tell(*map(printable, lines))
    return Ending(exit_code=as_shells_say(code), signals=running.got, is_out_of_memory=code != 0 and host.kills() > kills)


def _tell(sentence: str, *more: str) -> None:
    """Write on stderr, unless it is gone; also in the midst of a write."""
    with suppress(OSError):
        os.write(2, "".join(f"{line}\n" for line in (f"samerun: {sentence}", *more)).encode())
