"""A Slurm job's times, and its way back into the queue. Facts: Slurm 22.05, tried on a real one.

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
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence

from app.environment import number
from launch.job import Job, NotDoneError, Requeued, Times

_HOLD_S = 15
"""Seconds in the queue before the next start: time enough for the job's last processes and its epilog. If they take
longer, Slurm holds the job for its 120 s."""

Scontrol = Callable[[Sequence[str]], str]
"""Runs scontrol with these arguments and returns what it prints. Raises NotDoneError with what it says if it fails."""


def find(environment: Mapping[str, str], *, scontrol: Scontrol | None = None) -> Job | None:
    """Return the Slurm job that `environment` is part of, or None outside Slurm.

    `scontrol` runs the program of that name, which is asked for nothing before it is needed.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    in_step = "SLURM_STEP_ID" in environment
    in_script = not in_step and "SLURMD_NODENAME" in environment  # the shell of salloc is on no node
    job_id = _job_id(environment)
    scontrol = scontrol or _scontrol
    return Job(
        # Steps of one job, side by side, are runs of their own.
        name=f"{job_id}.{environment['SLURM_STEP_ID']}" if in_step else job_id,
        # Each task would ask; what started them has asked, or they do without.
        times=functools.partial(_times, environment, job_id, None if in_step else scontrol),
        requeues=number(environment, "SLURM_RESTART_COUNT"),
        requeue=functools.partial(_requeue, environment, job_id, scontrol) if in_script else None,
    )


def _job_id(environment: Mapping[str, str]) -> str:
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def _times(environment: Mapping[str, str], job_id: str, scontrol: Scontrol | None) -> Times:
    why_not = ""
    if scontrol is not None:
        try:
            facts = _describe(job_id, scontrol)
        except NotDoneError as error:
            why_not = f"; {error}"
        else:
            submitted_s, started_s, ends_s = (_moment(facts.get(f"{name}Time", "")) for name in ("Submit", "Start", "End"))
            return Times(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin="scontrol show job")
    start, end = (environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    origin = f"SLURM_JOB_END_TIME={end}" if end else f"SLURM_JOB_END_TIME is not set{why_not}"
    return Times(started_s=_moment(start), ends_s=_moment(end), origin=origin)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None  # `Unknown`, or nothing


def _requeue(environment: Mapping[str, str], job_id: str, scontrol: Scontrol, _signals: Collection[int]) -> Requeued:
    """Put the job back into the queue, unless that has been done, or it was cancelled."""
    facts = _describe(job_id, scontrol)
    again = f"Slurm runs job {job_id} again"
    if int(facts.get("Restarts", "0")) > number(environment, "SLURM_RESTART_COUNT"):
        again = f"job {job_id} is in Slurm's queue again already"
    elif facts.get("JobState") == "RUNNING" or _is_at_its_limit(facts):
        scontrol(["requeue", job_id])
    else:
        raise NotDoneError(f"Slurm was ending job {job_id}, as after scancel")
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


def _describe(job_id: str, scontrol: Scontrol) -> dict[str, str]:
    """The fields of `scontrol show job`, times in Unix seconds; of those with the same name the first."""
    text = scontrol(["--oneliner", "show", "job", job_id])
    return dict(reversed(re.findall(r"(\w+)=(\S+)", text)))


def _scontrol(arguments: Sequence[str]) -> str:
    command = ["env", "SLURM_TIME_FORMAT=%s", "scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise NotDoneError(f"`{' '.join(command[2:])}` fails: {said}") from error
