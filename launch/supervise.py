"""A run from outside: it is passed its signals and watched on stderr, so that it ends as it ended.

`accelerate launch` ends with exit code 1 whatever its processes returned, and the launcher of each node says what it saw, in
any order: the process that failed, those that lost it, and what was ended for that. So the last words of the one that failed
first are said again, last, and its exit code becomes the run's.

A signal means that the run is to save and stop, which takes its time, and what starts it would not leave it that time:
`signals.py` knows the way past it.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from app.errors import SamerunError
from launch import signals

_REMEMBERED_LINES = 200
_STOP_AND_GO_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ECHO_S = 5.0
"""Slurm tells batch script and tasks that a job ends, and the one tells the others: a signal that comes twice within this time
counts once. A process that has saved for it and is about to end may die of the second."""

# A line of a process (`command.py` asks torchrun for its rank and host; on one machine, whose terminal it writes to itself,
# there is only the `[rank1]: ` that torch adds to a traceback), or of a launcher, after srun's label with the number of the
# task if there is one.
_LINE = re.compile(
    r"(?:\s*(?P<task>\d+): )?(?:\[(?P<rank>rank \d+) on (?P<host>\S+)\] )?(?:\[rank(?P<torch_rank>\d+)\]: )?(?P<text>.*)"
)
# torchrun's summary of a node: the root cause comes first, in lines such as `  rank      : 1 (local_rank: 0)`.
_SUMMARY = re.compile(r"\s+(host|rank|exitcode)\s+: (\S+)")
_ROOT_CAUSE = "Root Cause"
# What it says before, when a process has ended.
_LAUNCHER_ENDS = re.compile(r"[EW]\d{4} .*torch/distributed/.*(?: closing signal |failed \(exitcode: )")
# What srun says of a node whose launcher failed itself.
_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): task (?P<task>\d+): Exited with exit code (?P<code>\d+)")
# Where the last words begin: a traceback, or our own sentence.
_TRACEBACK = "Traceback (most recent call last)"
_SENTENCE = re.compile(r"(?:samerun: )?(?P<name>\w+Error): |Fatal Python error")
_ERRORS = {error.__name__: error.exit_code for error in SamerunError.__subclasses__()}
_ANY = "one of this machine's processes"
_LOST_NODE = re.compile(r"srun: error: Node failure on (?P<host>\S+)")


@dataclass(frozen=True)
class Culprit:
    """What failed first: a process, or the launcher of a node."""

    name: str
    """`rank 1 on node2`, or the node's."""
    exit_code: int
    """As Python has it: -9 after SIGKILL."""
    last_words: tuple[str, ...]
    """The traceback or the sentence with which it ended, or nothing."""


class Watch:
    """What the lines of a run say of its end."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_LINES))
        self._is_over = False
        self._summary: dict[str, str] | None = None
        self._hosts: dict[str, str] = {}
        self._process: tuple[str, int] | None = None
        self._node: tuple[str, str, int] | None = None
        self.error_code: int | None = None
        """Exit code of the last error of `app/errors.py` that was said."""
        self.lost_node: str | None = None
        """The node that Slurm said is gone."""

    def see(self, line: str) -> None:
        """Take in one line of the run's stderr."""
        found = _LINE.match(line)
        assert found is not None
        task, rank, text = found["task"], found["rank"], found["text"]
        self._is_over |= bool(_LAUNCHER_ENDS.match(line))
        if rank:
            self._hosts[rank] = found["host"]
            self._lines[rank].append(text)
        elif task:
            self._lines[task].append(text)
        elif found["torch_rank"]:
            self._lines[f"rank {found['torch_rank']}"].append(text)
        elif not self._is_over:
            self._lines[_ANY].append(text)
        if sentence := _SENTENCE.match(text):
            self.error_code = _ERRORS.get(sentence["name"] or "", self.error_code)
        if lost := _LOST_NODE.match(line):
            self.lost_node = lost["host"]
        if ended := _TASK_ENDED.match(line):
            self._node = self._node or (ended["host"], ended["task"], int(ended["code"]))
        elif not rank and self._process is None:
            self._read_summary(text)

    def _read_summary(self, text: str) -> None:
        """Of the first launcher that has one: those of other nodes speak of processes that lost this one."""
        if _ROOT_CAUSE in text:
            self._summary = {}
        elif self._summary is not None and (part := _SUMMARY.match(text)):
            self._summary[part[1]] = part[2]
            if self._summary.keys() == {"host", "rank", "exitcode"}:
                rank = f"rank {self._summary['rank']}"
                self._hosts.setdefault(rank, self._summary["host"])
                self._process = rank, int(self._summary["exitcode"])

    @property
    def culprit(self) -> Culprit | None:
        """What failed first, if anything said so."""
        if self._process:
            rank, code = self._process
            # What a signal ended said nothing of it.
            lines = self._lines[rank] or (self._lines[_ANY] if code > 0 else ())
            return _culprit(f"{rank} on {self._hosts[rank]}", code, lines)
        if self._node:
            host, task, code = self._node
            # The launcher of one process ends with 1 whatever that did, so then what was said counts.
            said = self.error_code if code == 1 else None
            return _culprit(host, said or code, self._lines[task])
        return None


def _culprit(name: str, exit_code: int, lines: Iterable[str]) -> Culprit:
    return Culprit(name, exit_code, tuple(f"[{name}] {line}" for line in _last_words(lines)))


def _last_words(lines: Iterable[str]) -> list[str]:
    """The lines from the last traceback on, or else from the last sentence on."""
    said = list(lines)
    tracebacks = [at for at, line in enumerate(said) if line.startswith(_TRACEBACK)]
    sentences = [at for at, line in enumerate(said) if _SENTENCE.match(line)]
    return said[(tracebacks or sentences or [len(said)])[-1] :]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    exit_code: int
    """For this process to end with, as shells have it: 137 after SIGKILL."""
    signals: Collection[int]
    """Those that this process got, and gets: they are still received after the end of the run."""
    error_code: int | None
    """Exit code of the error of `app/errors.py` that ended it, if it was one."""
    lost_node: str | None
    """The node that is gone, if Slurm said so."""


def run(command: Sequence[str], environment: Mapping[str, str], *, pass_on: signals.PassOn, watched: bool) -> Ending:
    """Run the command to its end, with the signals that this process gets, passed on by `pass_on`.

    Unless it is `watched`, its stderr is this process's own, a terminal for instance, and less is known of its end.
    """
    started: subprocess.Popen[bytes] | None = None
    got: list[int] = []
    passed_on_s = -math.inf

    def receive(number: int, _frame: FrameType | None) -> None:
        nonlocal passed_on_s
        got.append(number)
        is_echo = number in _STOP_AND_GO_ON and time.monotonic() - passed_on_s < _ECHO_S
        if started is not None and started.poll() is None and not is_echo:
            passed_on_s = time.monotonic()
            pass_on(started.pid, number)

    for number in signals.ALL:
        signal.signal(number, receive)
    stderr = subprocess.PIPE if watched else None
    started = subprocess.Popen(command, env=dict(environment), stderr=stderr, start_new_session=True)
    for early in got:  # while it was being started
        pass_on(started.pid, early)
    watch = Watch()
    if started.stderr is not None:
        for line in _copied(started, started.stderr, sys.stderr.buffer):
            watch.see(line)
    code = started.wait()
    culprit, error_code = watch.culprit if code else None, watch.error_code
    if culprit is not None:
        sys.stderr.writelines(f"{line}\n" for line in (_verdict(culprit), *culprit.last_words))
        sys.stderr.flush()
        code = culprit.exit_code
        error_code = code if code in _ERRORS.values() else None
    elif code == 1 and error_code is not None:
        code = error_code  # one process: its launcher ends with 1 whatever it did
    return Ending(exit_code=_as_shells_say(code), signals=got, error_code=error_code, lost_node=watch.lost_node)


def _copied(started: subprocess.Popen[bytes], source: IO[bytes], target: IO[bytes]) -> Iterable[str]:
    """Copy at once what comes, half lines too, and yield the whole lines, until the command has ended.

    Not until nobody can write any more: it may leave something behind that never ends.
    """
    rest = b""
    while True:
        has_ended = started.poll() is not None
        while select.select([source], [], [], 0.0 if has_ended else 0.2)[0]:
            chunk = os.read(source.fileno(), 2**16)
            if not chunk:
                return
            target.write(chunk)
            target.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        if has_ended:
            return


def _verdict(culprit: Culprit) -> str:
    how = f"ended with exit code {culprit.exit_code}"
    if culprit.exit_code < 0:
        name = signal.Signals(-culprit.exit_code).name
        how = f"was ended by {name}" + (", as by a lack of memory" if name == "SIGKILL" else "")
    return f"samerun: {culprit.name} {how}, and the run with it" + (":" if culprit.last_words else "")


def _as_shells_say(code: int) -> int:
    return 128 - code if code < 0 else code
