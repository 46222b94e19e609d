"""The times of a PBS job, and the job that continues it. Facts: OpenPBS 23.06.

A plain user's job cannot be requeued (qrerun is for operators), so it submits another like itself: `qstat -f` knows its script
and what it asked for, on qsub's command line or in the script. The successor has another id, so it is told the first one's,
after which the run folder is named.
"""

from __future__ import annotations

import functools
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from app.errors import TopologyError
from app.place.environment import number
from launch.schedulers import pbs
from launch.schedulers.hosts import NODE_RANK
from launch.schedulers.job import Job, NotDoneError, Requeued, Times, ask

FIRST_JOB = "SAMERUN_FIRST_JOB"
"""Variable: number of the job whose run this job goes on with."""
REQUEUES = "SAMERUN_REQUEUES"
"""Variable: how many jobs went on with that run so far, this one included."""

# What every login shell has: with `qsub -V` they are in the list of a job's variables, and a new job gets its own.
_OF_A_LOGIN = {"HOME", "LANG", "LOGNAME", "MAIL", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "TZ", "USER", "_"}
# PBS adds these to a job that asked for chunks (select=...), and refuses them together.
_OF_CHUNKS = {"mem", "mpiprocs", "ncpus", "ngpus", "nodect", "nodes", "ompthreads", "vmem"}


def find(
    environment: Mapping[str, str],
    *,
    describe_job: Callable[[str], str | None] = pbs.qstat,
    qsub: Callable[..., str] = ask,
) -> Job | None:
    """Return the PBS job that `environment` is part of, or None outside PBS.

    `describe_job` asks for `qstat -f -F json`, `qsub` submits as `ask` does, and returns the new id.
    """
    if "PBS_JOBID" not in environment:
        return None
    number_and_index = re.findall(r"\d+", environment["PBS_JOBID"].partition(".")[0])
    is_script = environment.get("PBS_ENVIRONMENT") == "PBS_BATCH" and NODE_RANK not in environment
    return Job(
        name="_".join([environment.get(FIRST_JOB, number_and_index[0]), *number_and_index[1:]]),
        times=functools.partial(_times, environment["PBS_JOBID"], describe_job),
        requeues=number(environment, REQUEUES),
        requeue=functools.partial(_resubmit, environment, describe_job, qsub) if is_script else None,
    )


def _times(job_id: str, describe_job: Callable[[str], str | None]) -> Times:
    text = describe_job(job_id)
    if text is None:
        return Times(origin="there is no qstat here")
    try:
        return pbs.parse_job(text, job_id=job_id)[0]
    except TopologyError as error:
        return Times(origin=str(error))


def _resubmit(
    environment: Mapping[str, str],
    describe_job: Callable[[str], str | None],
    qsub: Callable[..., str],
    signals: Collection[int],
) -> Requeued:
    job_id = environment["PBS_JOBID"]
    ends_s = _times(job_id, describe_job).ends_s
    if signal.SIGTERM in signals and (ends_s is None or time.time() < ends_s):
        raise NotDoneError(f"PBS was ending job {job_id}, for example after qdel")
    if "[" in job_id:  # PBS_ARRAY_INDEX tells less: a job that `qsub -V` submits in an array inherits it
        raise NotDoneError(f"job {job_id} is an array job, and PBS cannot resubmit one of its tasks")
    try:
        attributes = pbs.attributes_of(describe_job(job_id) or "", job_id=job_id)
        command = successor(attributes, submitted_in=environment["PBS_O_WORKDIR"], requeues=number(environment, REQUEUES) + 1)
    except (ValueError, KeyError, TypeError) as error:
        raise NotDoneError(f"`qstat -f -F json {job_id}` does not describe the job ({error!r})") from error
    variables = {REQUEUES: str(number(environment, REQUEUES) + 1)}
    variables[FIRST_JOB] = environment.get(FIRST_JOB, job_id.partition(".")[0])
    return Requeued(f"PBS job {qsub(command, **variables).strip()} continues it")


def successor(attributes: Mapping[str, Any], *, submitted_in: str, requeues: int) -> list[str]:
    """Return the qsub that submits a job like the one with these attributes, given by `qstat -f -F json`.

    `submitted_in` is the folder where qsub was called. A log with a name of its own gets another, with the number `requeues`,
    or it would be replaced. Variables are named only, their values come from qsub's environment: a command line can be
    read by everybody, and PBS takes commas in it apart. Raises NotDoneError for a job without a script's file.
    """
    script = Path(submitted_in, attributes["Submit_arguments"].split()[-1])
    if not script.is_file():
        raise NotDoneError(f"qsub was called with {attributes['Submit_arguments']!r}, which does not end with a script")
    command = ["qsub", "-N", attributes["Job_Name"], "-q", attributes["queue"]]
    command += ["-A", attributes["Account_Name"]] if "Account_Name" in attributes else []
    resources = attributes.get("Resource_List", {})
    for name, value in resources.items():
        if name not in _OF_CHUNKS or "select" not in resources:
            command += ["-l", f"{name}={value}"]
    command += ["-j", attributes.get("Join_Path", "n")]
    log = attributes.get("Output_Path", "").partition(":")[2]
    if log and not re.search(r"\.o\d+$", log):
        command += ["-o", f"{log.removesuffix(f'.{requeues - 1}')}.{requeues}"]
    given = [name for name in attributes.get("Variable_List", {}) if not name.startswith("PBS_")]
    names = dict.fromkeys([REQUEUES, FIRST_JOB, *(name for name in given if name not in _OF_A_LOGIN)])
    return [*command, "-v", ",".join(names), str(script)]
