"""The scheduler's job of a run and what it gave: hosts, when its time ends, and how it is requeued.

`slurm_job.py` and `pbs_job.py` each turn an environment (a mapping) into a `Job`; `detect.py` asks them in
turn. Standard library only.

`slurm.py`, `pbs.py` and `hosts.py` each turn an environment (a mapping) into an `Allocation`, or None where
they see nothing of theirs; `detect.py` asks them in turn. Standard library only.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from app.environment.topology import Topology
from app.environment.variables import END_TIME, START_TIME, SUBMIT_TIME, number

ATTEMPT = "SAMERUN_ATTEMPT"
"""Variable: to which start of a run a process belongs, different for every start."""


class NotDoneError(Exception):
    """The scheduler refused a request; the text is its answer."""


def ask(command: Sequence[str], **variables: str) -> str:
    """Run a scheduler's program, with these variables added, and return what it prints. Raises NotDoneError if it fails."""
    told = [f"{name}={value}" for name, value in variables.items()]
    try:
        return subprocess.run(["env", *told, *command], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise NotDoneError(f"`{shlex.join(command)}` fails: {said}") from error


@dataclass(frozen=True, kw_only=True)
class Times:
    """Moments of a job in Unix seconds; None where they are not known, or there is none."""

    submitted_s: float | None = None
    started_s: float | None = None
    ends_s: float | None = None
    origin: str
    """Where they stand, or why nobody knows them."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Times:
        """Return what the variables say."""
        submitted_s, started_s, ends_s = (
            number(environment, name) if name in environment else None for name in (SUBMIT_TIME, START_TIME, END_TIME)
        )
        return cls(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin=END_TIME)

    def told(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with what the ranks are to know, instead of what another job may have left there."""
        moments = {SUBMIT_TIME: self.submitted_s, START_TIME: self.started_s, END_TIME: self.ends_s}
        known = {name: f"{moment:.0f}" for name, moment in moments.items() if moment is not None}
        return {name: value for name, value in environment.items() if name not in moments} | known


@dataclass(frozen=True)
class Requeued:
    """That a job will be run again."""

    sentence: str
    exit_code: int = 0
    """With which this one has to end."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that this process is part of."""

    name: str
    """For the run folder, `22` or of an array `14_3`: the same whenever the job is run again."""
    times: Callable[[], Times]
    """Asks for the moments, the scheduler if need be: a program is started."""
    requeues: int = 0
    """How often the job was in the queue again."""
    requeue: Callable[[Collection[int]], Requeued] | None = None
    """Has the job run again; is told which signals this process got. Raises NotDoneError. None where this process is not what
    the scheduler would run again: in a shell of salloc, a task of srun."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of one run in a scheduler's allocation."""

    scheduler: str
    """What it is part of, for messages: `Slurm job 22`."""
    topology: Topology
    """As seen from this node if this process is the one task of its node, else from node 0. `hosts` are always known."""
    start: tuple[str, ...] = ()
    """Command that starts another command once on every node, to be put before it. Empty if that has been done: this process
    is the task of its node. A task finds its own node rank, but not always what the whole allocation looks like, so it is
    told the number of processes (--processes-per-node)."""
    start_origin: str = ""
    """Why it must be started so: `the batch script runs on the first node only`."""
    is_task: bool = False
    """Whether this process is the one task of its node, so that what started it sees to the rest of the run."""
