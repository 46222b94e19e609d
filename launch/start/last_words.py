"""Finds in a run's output which process failed first, and its last lines.

`accelerate launch` ends with exit code 1 whatever its processes returned, and the launcher of each node says what it saw, in
any order: the process that failed, those that lost it, and what was ended for that.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from launch.run_module import FAILED_FIRST

_REMEMBERED_LINES = 200

# A line of a process (`node_command.py` asks torchrun for its rank and host; on one machine, whose terminal it writes to,
# there is only the `[rank1]: ` that torch adds to a traceback), or of a launcher, after srun's label with the number of the
# task if there is one.
_LINE = re.compile(
    r"(?:\s*(?P<task>\d+): )?(?:\[(?P<rank>rank \d+) on (?P<host>\S+)\] )?(?:\[rank(?P<torch_rank>\d+)\]: )?(?P<text>.*)"
)
# What the launcher of a node says of it.
_FAILED_FIRST = re.compile(FAILED_FIRST.format(rank=r"(?P<rank>\d+)", host=r"(?P<host>\S+)", code=r"(?P<code>-?\d+)"))
# What torchrun says before, when a process has ended.
_LAUNCHER_ENDS = re.compile(r"[EW]\d{4} .*torch/distributed/.*(?: closing signal |failed \(exitcode: )")
# What srun says of a node whose launcher failed itself.
_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): task (?P<task>\d+): Exited with exit code (?P<code>\d+)")
# Where the last words begin: a traceback, or our own sentence.
_TRACEBACK = "Traceback (most recent call last)"
_SENTENCE = re.compile(r"(?:samerun: )?\w+Error: |Fatal Python error")
_ANY = "one of this machine's processes"
_LOST_NODE = re.compile(r"srun: error: Node failure on (?P<host>\S+)")


@dataclass(frozen=True)
class Culprit:
    """What failed first: a process, or the launcher of a node."""

    name: str
    """`rank 1 on node2`, or the node's."""
    exit_code: int
    """As Python has it: -9 after SIGKILL."""
    last_words: tuple[str, ...] = ()
    """The traceback or the sentence with which it ended, or nothing."""

    @property
    def verdict(self) -> str:
        """What is said of it before its last words."""
        number = self.exit_code - 128 if self.exit_code > 128 else -self.exit_code
        how = f"ended with exit code {self.exit_code}"
        if number in map(int, signal.Signals):
            name = signal.Signals(number).name
            how = f"was ended by {name}" + (", for example for lack of memory" if name == "SIGKILL" else "")
        return f"{self.name} {how}, and the run with it" + (":" if self.last_words else "")


class Watch:
    """What the lines of a run say of its end."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_LINES))
        self._is_over = False
        self._hosts: dict[str, str] = {}
        self._process: tuple[str, int] | None = None
        self._node: tuple[str, str, int] | None = None
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
        if lost := _LOST_NODE.match(line):
            self.lost_node = lost["host"]
        if ended := _TASK_ENDED.match(line):
            self._node = self._node or (ended["host"], ended["task"], int(ended["code"]))
        # The first launcher to say it: those of other nodes speak of processes that lost this one.
        elif not rank and self._process is None and (failed := _FAILED_FIRST.match(text)):
            self._process = f"rank {failed['rank']}", int(failed["code"])
            self._hosts.setdefault(self._process[0], failed["host"])

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
            return _culprit(host, code, self._lines[task])
        return None


def _culprit(name: str, exit_code: int, lines: Iterable[str]) -> Culprit:
    return Culprit(name, exit_code, tuple(f"[{name}] {line}" for line in _last_words(lines)))


def _last_words(lines: Iterable[str]) -> list[str]:
    """The lines from the last traceback on, or else from the last sentence on."""
    said = list(lines)
    tracebacks = [at for at, line in enumerate(said) if line.startswith(_TRACEBACK)]
    sentences = [at for at, line in enumerate(said) if _SENTENCE.match(line)]
    return said[(tracebacks or sentences or [len(said)])[-1] :]
