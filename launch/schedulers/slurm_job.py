"""The times of a Slurm job, and how it is requeued. Facts: Slurm 22.05, tested on a real one.

- `scontrol requeue` of an array's own id requeues every task, and the last task has that id as SLURM_JOB_ID: ARRAY_TASK it is.
- It also requeues a job that a user has just cancelled. A job that Slurm is ending is COMPLETING, whatever for; only `Restarts`
  tells that it is on its way into the queue.
- A requeued job waits 120 s (`batch_requeue_fini` in slurmctld), unless its StartTime lies in the future by then: this can be
  set by the job itself, as soon as it has been requeued and while its processes still end.
- There is no SLURM_JOB_END_TIME before 23.02.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from app.place.environment import number
from app.place.slurm_variables import JOB, is_in_step, is_shell
from launch.schedulers.job import Job, NotDoneError, Requeued, Times, ask

_HOLD_S = 15
"""Seconds in the queue before the next start: time enough for the job's last processes and its epilog. If they take
longer, Slurm holds the job for its 120 s."""

Scontrol = Callable[[Sequence[str]], str]
"""Runs scontrol with these arguments and returns what it prints. Raises NotDoneError with what it says if it fails."""


def _scontrol(arguments: Sequence[str]) -> str:
    return ask(["scontrol", *arguments], SLURM_TIME_FORMAT="%s")


def find(environment: Mapping[str, str], *, scontrol: Scontrol = _scontrol) -> Job | None:
    """Return the Slurm job that `environment` is part of, or None outside Slurm.

    `scontrol` runs the program of that name. It is asked for nothing before it is needed: at once only in an array and in a
    job that was requeued, as a job that is submitted there inherits the variables that say so.
    """
    if JOB.job_id not in environment:
        return None
    in_shell = is_shell(environment)
    in_step = is_in_step(environment) and not in_shell
    in_script = not in_step and not in_shell and JOB.node in environment  # the shell of salloc is on no node
    # Each task would ask; what started them has asked, or they do without.
    described = _Description(environment[JOB.job_id], None if in_step else scontrol)
    job_id, requeues = _job_id(environment, described), _requeues(environment, described)
    return Job(
        # Steps of one job, side by side, are runs of their own.
        name=f"{job_id}.{environment[JOB.step_id]}" if in_step else job_id,
        times=functools.partial(_times, environment, described),
        requeues=requeues,
        requeue=functools.partial(_requeue, described, job_id, requeues, scontrol) if in_script else None,
    )


class _Description:
    """What Slurm says of a job, by the job's own number: an array's tasks share the array's."""

    def __init__(self, number: str, scontrol: Scontrol | None) -> None:
        self._number, self._scontrol = number, scontrol
        self._known: dict[str, str] | NotDoneError | None = None

    def now(self) -> dict[str, str]:
        """Ask for the fields, times in Unix seconds; of those with the same name the first. Raises NotDoneError."""
        if self._scontrol is None:
            raise NotDoneError("a task does not ask")
        text = self._scontrol(["--oneliner", "show", "job", self._number])
        # The number of an array, which is that of its last task too, stands for all its tasks: a line for each.
        jobs = [dict(reversed(re.findall(r"(\w+)=(\S+)", line))) for line in text.splitlines()]
        for facts in jobs:
            if facts.get("JobId") == self._number:
                return facts
        raise NotDoneError(f"`scontrol show job {self._number}` does not show it")

    def at_start(self) -> dict[str, str]:
        """The same, asked once. Raises NotDoneError."""
        if self._known is None:
            try:
                self._known = self.now()
            except NotDoneError as error:
                self._known = error
        if isinstance(self._known, NotDoneError):
            raise self._known
        return self._known


def _job_id(environment: Mapping[str, str], described: _Description) -> str:
    if JOB.array_job_id not in environment:
        return environment[JOB.job_id]
    array, task = environment[JOB.array_job_id], environment[JOB.array_task_id]
    try:
        facts = described.at_start()
    except NotDoneError:
        return f"{array}_{task}"
    # A task of another array has submitted this job, if it is not one itself.
    return f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}" if "ArrayJobId" in facts else environment[JOB.job_id]


def _requeues(environment: Mapping[str, str], described: _Description) -> int:
    if JOB.restarts not in environment:
        return 0
    try:
        return int(described.at_start()["Restarts"])
    except (NotDoneError, KeyError):
        return number(environment, JOB.restarts)


def _times(environment: Mapping[str, str], described: _Description) -> Times:
    try:
        facts = described.at_start()
    except NotDoneError as error:
        why_not = f"; {error}"
    else:
        submitted_s, started_s, ends_s = (_moment(facts.get(f"{name}Time", "")) for name in ("Submit", "Start", "End"))
        return Times(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin="scontrol show job")
    start, end = (environment.get(name, "") for name in (JOB.started, JOB.ends))
    origin = f"{JOB.ends}={end}" if end else f"{JOB.ends} is not set{why_not}"
    return Times(started_s=_moment(start), ends_s=_moment(end), origin=origin)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None  # `Unknown`, or nothing


def _requeue(described: _Description, job_id: str, requeues: int, scontrol: Scontrol, _signals: Collection[int]) -> Requeued:
    """Put the job back into the queue, unless that has been done, or it was cancelled."""
    facts = described.now()
    again = f"Slurm requeues job {job_id}"
    if int(facts.get("Restarts", "0")) > requeues:
        again = f"job {job_id} has already been requeued by Slurm"
    elif facts.get("JobState") == "RUNNING" or _is_at_its_limit(facts):
        scontrol(["requeue", job_id])
    else:
        raise NotDoneError(f"Slurm was ending job {job_id}, for example after scancel")
    try:
        scontrol(["update", f"JobId={job_id}", f"StartTime=now+{_HOLD_S}"])
    except NotDoneError as error:
        return Requeued(f"{again}, 2 minutes from now at the earliest ({error})")
    return Requeued(again)


def _is_at_its_limit(facts: Mapping[str, str]) -> bool:
    """Whether Slurm ends the job for its time limit: EndTime is then the moment when it began to."""
    limit = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", facts.get("TimeLimit", ""))
    started_s, ended_s = _moment(facts.get("StartTime", "")), _moment(facts.get("EndTime", ""))
    if limit is None or started_s is None or ended_s is None:
        return False
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
    return ended_s - started_s >= ((days * 24 + hours) * 60 + minutes) * 60 + seconds
