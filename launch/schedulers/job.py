"""The scheduler's job of a run: its hosts, when its time ends, and how it is requeued.

`slurm.py` and `pbs.py` turn an environment (a mapping) into a `Job`; they and `hosts.py` turn it into an `Allocation`, or None
if their variables are not set. `detect.py` calls them in turn. Standard library only.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from app.environment.topology import Topology
from app.environment.variables import END_TIME, START_TIME, SUBMIT_TIME, number

ATTEMPT = "SAMERUN_ATTEMPT"
"""Variable: the start of a run that a process belongs to, different for every start."""


class NotDoneError(Exception):
    """The scheduler refused a request; the text is its answer."""


def ask(command: Sequence[str], **variables: str) -> str:
    """Run a scheduler's program, with these variables added, and return what it prints. Raises NotDoneError if it fails."""
    argv = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = (getattr(error, "stderr", None) or str(error)).strip()
        raise NotDoneError(f"`{shlex.join(command)}` fails: {answer}") from error


@dataclass(frozen=True, kw_only=True)
class Times:
    """Moments of a job in Unix seconds; None: unknown, or no such moment."""

    submitted_s: float | None = None
    started_s: float | None = None
    ends_s: float | None = None
    origin: str
    """Where they were read, or why they are unknown."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Times:
        """Return the times in Samerun's own variables."""
        submitted_s, started_s, ends_s = (
            number(environment, name) if name in environment else None for name in (SUBMIT_TIME, START_TIME, END_TIME)
        )
        return cls(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin=END_TIME)

    def added_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the ranks, with these times in place of those that another job may have set."""
        moments = {SUBMIT_TIME: self.submitted_s, START_TIME: self.started_s, END_TIME: self.ends_s}
        known = {name: f"{moment:.0f}" for name, moment in moments.items() if moment is not None}
        return {name: value for name, value in environment.items() if name not in moments} | known


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that this process is part of."""

    name: str
    """For the run folder, `22` or of an array `14_3`: the same whenever the job is run again."""
    times: Callable[[], Times]
    """Finds the times; it may start a program of the scheduler."""
    requeues: int = 0
    """How often the job was requeued."""
    requeue: Callable[[Collection[int]], str] | None = None
    """Requeues the job, given the signals that this process received, and returns a sentence on it. Raises NotDoneError. None:
    the scheduler would not run this process again, as in a shell of salloc or a task of srun."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of one run in a scheduler's allocation."""

    scheduler: str
    """Its name in messages: `Slurm job 22`."""
    topology: Topology
    """As seen from this node if this process is the one task of its node, else from node 0. `hosts` are always known."""
    start: tuple[str, ...] = ()
    """Words that, put before a command, start it once on every node. Empty in the task of a node, which was started so. A task
    finds its own node rank, but not always the shape of the allocation: --processes-per-node gives it the processes."""
    start_origin: str = ""
    """Reason for `start`: `the batch script runs on the first node only`."""
    is_task: bool = False
    """Whether this process is the one task of its node; the process that started it restarts and requeues the run."""
