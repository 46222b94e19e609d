"""A run across nodes from outside: it is passed its signals and watched on stderr, so that it ends as it ended.

`accelerate launch` ends with exit code 1 whatever its processes returned, and the launcher of each node says what it saw, in
any order: the process that failed, those that lost it, and what was ended for that. So the last words of the one that failed
first are said again, last, and its exit code becomes the run's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_REMEMBERED_LINES = 200

# How a process's lines begin (`command.py` asks torchrun for it), after srun's label if there is one.
_LINE = re.compile(r"(?:\s*\d+: )?\[rank (\d+) on (\S+)\] (.*)")
# torchrun's summary of a node: the root cause comes first, in lines such as `  rank      : 1 (local_rank: 0)`.
_SUMMARY = re.compile(r"(?:\s*\d+: )?\s+(host|rank|exitcode)\s+: (\S+)")
_ROOT_CAUSE = "Root Cause"
# Where the last words of a process begin: a traceback, or our own sentence.
_LAST_WORDS = re.compile(r"Traceback \(most recent call last\)|\w+Error: |Fatal Python error")


@dataclass(frozen=True)
class Culprit:
    """The process that failed first, as its launcher says."""

    rank: int
    exit_code: int
    """As Python has it: -9 after SIGKILL."""
    host: str


class Watch:
    """What the lines of a run say of its end."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_LINES))
        self._summary: dict[str, str] | None = None
        self.culprit: Culprit | None = None

    def see(self, line: str) -> None:
        """Take in one line of the run's stderr."""
        if self.culprit is not None and _ROOT_CAUSE in line:
            return  # of another node, whose processes lost this one
        own = _LINE.match(line)
        if own:
            self._lines[int(own[1])].append(line)
        elif _ROOT_CAUSE in line:
            self._summary = {}
        elif self._summary is not None and (part := _SUMMARY.match(line)):
            self._summary[part[1]] = part[2]
            if self._summary.keys() == {"host", "rank", "exitcode"}:
                rank, code = int(self._summary["rank"]), int(self._summary["exitcode"])
                self.culprit, self._summary = Culprit(rank, code, self._summary["host"]), None

    def last_words(self, rank: int) -> list[str]:
        """Return the lines with which a process ended: its last traceback or sentence, or nothing."""
        lines = list(self._lines[rank])
        texts = [match[3] if (match := _LINE.match(line)) else line for line in lines]
        begins = [at for at, text in enumerate(texts) if _LAST_WORDS.match(text)]
        tracebacks = [at for at in begins if texts[at].startswith("Traceback")]
        return lines[(tracebacks or begins or [len(lines)])[-1] :]


def run(command: Sequence[str]) -> int:
    """Run the command to its end, with the signals that this process gets, and return the exit code of the run."""
    started = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        started.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    watch = Watch()
    assert started.stderr is not None
    for line in _copied(started.stderr, sys.stderr.buffer):
        watch.see(line)
    code = started.wait()
    if code == 0:
        return 0
    sys.stderr.writelines(_verdict(watch))
    sys.stderr.flush()
    return _as_shells_say(watch.culprit.exit_code if watch.culprit else code)


def _copied(source: IO[bytes], target: IO[bytes]) -> Iterable[str]:
    """Copy at once what comes, half lines too, and yield the whole lines."""
    rest = b""
    while chunk := os.read(source.fileno(), 2**16):
        target.write(chunk)
        target.flush()
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _verdict(watch: Watch) -> Iterable[str]:
    culprit = watch.culprit
    if culprit is None:
        return
    words = watch.last_words(culprit.rank)
    if culprit.exit_code < 0:
        name = signal.Signals(-culprit.exit_code).name
        how = f"was ended by {name}" + (", as by a lack of memory" if name == "SIGKILL" else "")
    else:
        how = f"ended with exit code {culprit.exit_code}"
    yield f"samerun: rank {culprit.rank} on {culprit.host} {how}, and the run with it" + (":\n" if words else "\n")
    yield from (f"{line}\n" for line in words)


def _as_shells_say(code: int) -> int:
    return 128 - code if code < 0 else code
