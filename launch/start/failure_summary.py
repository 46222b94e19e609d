"""Finds out how a run failed, from its files in RUN/errors (app/runs/failure.py), srun's own lines, and an exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from app.runs import failure
from app.runs.failure import ProcessFailure
from launch.run_module import ACCELERATE

_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): task \d+: Exited with exit code (?P<code>\d+)")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<host>\S+)")
_NAMES = {ACCELERATE: "`accelerate launch`", "launch.start.spread": "what starts it on the hosts"}


class StderrReports:
    """What a run's stderr reports of its nodes: lines of srun."""

    def __init__(self) -> None:
        self.last_line = ""
        self.failed: ProcessFailure | None = None
        """The node whose task failed first, or that is gone."""
        self.lost_node: str | None = None

    def read(self, line: str) -> None:
        """Take in one line."""
        self.last_line = line
        if lost := _NODE_FAILED.match(line):
            self.lost_node = lost["host"]
            self.failed = ProcessFailure(exit_code=1, host=self.lost_node, error="Slurm reports that the node has failed")
        elif self.failed is None and (ended := _TASK_ENDED.match(line)):
            self.failed = ProcessFailure(exit_code=int(ended["code"]), host=ended["host"])


def find(
    errors: Path | None, reports: StderrReports, command: Sequence[str], code: int, received: Collection[int]
) -> ProcessFailure | None:
    """Return the failure that ended a start whose `command` ended with `code`, and record it, if any process recorded none.

    `received` are the signals that came to this process.
    """
    found = failure.first(errors)
    if found is None or (found.is_consequence and reports.lost_node):
        found = reports.failed or _by_exit_code(command, code, received)
        if found is not None:
            failure.record(errors, found)
    return found


def lines(failed: ProcessFailure, reports: StderrReports) -> list[str]:
    """Return what a user is shown last: which process failed and how, and its traceback or its sentence.

    Nothing if that is the last of stderr already.
    """
    text = (failed.traceback or failed.error).splitlines()
    if text[-1:] == [reports.last_line]:
        return []
    return [f"{failed}, and the run with it" + (":" if text else ""), *(f"[{failed.name}] {line}" for line in text)]


def _by_exit_code(command: Sequence[str], code: int, received: Collection[int]) -> ProcessFailure | None:
    """Return the failure of the command, or of a process that it started, but for a signal that came to this process too."""
    number = -code if code < 0 else code - 128
    if number in received:
        return None
    if command[0] == "env" and ACCELERATE not in command:  # one_process.py
        return ProcessFailure(exit_code=code, rank=0)
    if number not in map(int, signal.Signals):
        return None
    names = [name for module, name in _NAMES.items() if module in command] or [Path(command[0]).name]
    return ProcessFailure(exit_code=-number, process="a process" if code > 0 and ACCELERATE in command else names[0])
