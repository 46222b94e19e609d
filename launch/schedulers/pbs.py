"""PBS (OpenPBS and PBS Pro; Torque as far as it uses the same names): a job's hosts, its times, and the job that continues it.

The environment is a mapping passed in, files are read and jobs described through functions passed in. Facts: OpenPBS 23.06.

- $PBS_NODEFILE has a line per MPI process (`mpiprocs`, 1 by default), grouped by host. No variable holds the number of hosts,
  processes or GPUs; `qstat -f` reports it. It is not set in tasks that pbs_tmrsh or pbsdsh start on the first host, so the
  batch script reads it and passes it to the hosts.
- A remote task has a minimal PATH, the home folder and nothing that the batch script exported.
- Two chunks may be placed on one host unless the job has `place=scatter`.

A plain user's job cannot be requeued (qrerun is for operators), so it submits another like itself: `qstat -f` reports its
script and its requests, on qsub's command line or in the script. The successor has another id, so it gets the first one's,
which is in the name of the run folder.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from app.environment.topology import number, port_of_job
from app.errors import TopologyError
from launch.schedulers import hosts
from launch.schedulers.hosts import NODE_RANK, Allocation, Job, NotDoneError, Times, ask, count_accelerators


def find(
    environment: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    nodes: int | None = None,
    describe_job: Callable[[str], str] | None = None,
    read: Callable[[str], str] = lambda path: Path(path).read_text(),
    device_folder: Path = Path("/dev"),
) -> Allocation | None:
    """Return the job that `environment` belongs to, seen from its batch script on the first host, or None outside of PBS jobs.

    Processes on a host are `processes_per_node` where given; else as many as GPUs; else the lines of $PBS_NODEFILE. GPUs are
    the visible ones and, if no variable names the job's, no more than `describe_job` reports (by default `qstat -f -F
    json`, where there is one). A process that `launch/start/spread.py` started is left to `hosts.find`. Raises TopologyError.
    """
    if "PBS_JOBID" not in environment or NODE_RANK in environment:
        return None
    job_id = environment["PBS_JOBID"]
    if environment.get("PBS_TASKNUM", "1") != "1":
        raise TopologyError(
            f"pbs_tmrsh, pbsdsh or mpirun started this process (PBS_JOBID={job_id}, "
            f"PBS_TASKNUM={environment['PBS_TASKNUM']}), and each such process would launch the whole run. "
            "Call `samerun launch` once, in the batch script or a shell of qsub -I"
        )
    slots = count_hosts(environment, read=read)
    describe_job = describe_job or qstat
    accelerators = _gpus_by_host(environment, processes_per_node, describe_job, device_folder)
    job = hosts.topology(
        slots,
        slots_origin="PBS_NODEFILE",
        accelerators=accelerators,
        asked=processes_per_node,
        port=(port(job_id), f"PBS_JOBID={job_id}"),
    )
    threads, threads_origin = _threads(environment, job.processes_per_node, describe_job)
    if threads is not None:
        job = hosts.with_threads(job, threads, threads_origin)
    return hosts.allocation(environment, f"PBS job {job_id}", job.on_first(nodes), starter="pbs_tmrsh")


def _gpus_by_host(
    environment: Mapping[str, str], asked: int | None, describe_job: Callable[[str], str], device_folder: Path
) -> tuple[Mapping[str, int], str]:
    """Return the known GPUs of some or all hosts, and their origin. The server is asked only where the answer matters."""
    here, origin = count_accelerators(environment, device_folder=device_folder)
    if here and asked is None and "CUDA_VISIBLE_DEVICES" not in environment:
        with suppress(NotDoneError):  # there is no qstat here
            gpus = parse_job(describe_job(environment["PBS_JOBID"]), job_id=environment["PBS_JOBID"])[1]
            if any(gpus.values()):  # else the site does not count them, and gives whole nodes
                return gpus, "exec_vnode of qstat -f"
    return {"this host": here}, f"{origin} on this host"


def qstat(job_id: str) -> str:
    """Return the output of `qstat -f -F json` for a job. Raises NotDoneError, for example where there is no qstat."""
    return ask(["qstat", "-f", "-F", "json", job_id])


def count_hosts(environment: Mapping[str, str], *, read: Callable[[str], str]) -> dict[str, int]:
    """Return the number of lines in $PBS_NODEFILE for each host, in their order. Raises TopologyError if there is no line."""
    path, why, counts = environment.get("PBS_NODEFILE", ""), "is not set", Counter[str]()
    if path:
        try:
            counts, why = Counter(read(path).split()), f"{path} is empty"
        except OSError as error:
            why = f"{path} cannot be read: {error.strerror}"
    if not counts:
        raise TopologyError(
            f"PBS_JOBID is {environment['PBS_JOBID']}, but PBS_NODEFILE {why}: start the run from the batch script "
            "(launch/multinode.pbs); if these variables are left over from another job, unset PBS_JOBID"
        )
    return dict(counts)


def port(job_id: str) -> int:
    """Return a port for a job id such as `14.head` or, of an array, `14[1].head` (Torque also `14-1.head`).

    Raises TopologyError for an id without number.
    """
    numbers = re.match(r"(\d+)(?:\[(\d+)\]|-(\d+))?", job_id)
    if numbers is None:
        raise TopologyError(f"PBS_JOBID is {job_id!r}: it must begin with a number, such as 14.head or 14[1].head")
    return port_of_job(int(numbers[1]), int(numbers[2] or numbers[3] or 0))


def _threads(
    environment: Mapping[str, str], processes_per_node: int, describe_job: Callable[[str], str]
) -> tuple[int | None, str]:
    """Return the CPU threads of each process.

    PBS sets NCPUS and OMP_NUM_THREADS to the CPUs of a chunk, for any processes, or both to the `ompthreads` that it requests.
    """
    threads, cpus = environment.get("OMP_NUM_THREADS"), environment.get("NCPUS")
    if threads is not None and threads != cpus:
        return number(environment, "OMP_NUM_THREADS"), f"OMP_NUM_THREADS={threads}"
    if cpus is None:
        return None, ""
    if processes_per_node > 1:
        with suppress(NotDoneError):  # there is no qstat here
            described = describe_job(environment["PBS_JOBID"])
            if requested := re.search(r'"select":\s*"[^"]*\bompthreads=(\d+)', described):
                return int(requested[1]), f"ompthreads={requested[1]} of qstat -f"
    return max(number(environment, "NCPUS") // processes_per_node, 1), f"NCPUS={cpus}, divided by the processes"


def _attributes(text: str, job_id: str) -> dict[str, Any]:
    """Return the attributes of a job in the output of `qstat -f -F json`. Raises ValueError, KeyError or TypeError."""
    # strict=False: a line break in a variable of the job arrives unescaped.
    attributes: dict[str, Any] = json.loads(text, strict=False)["Jobs"][job_id]
    return attributes


def parse_job(text: str, *, job_id: str) -> tuple[Times, dict[str, int]]:
    """Return a job's times, and the GPUs (`ngpus`) on each of its nodes, from `text`, the output of `qstat -f -F json`.

    There is no end before the job runs or where it has no limit, and no GPUs before it runs. PBS reports the time of its
    server, which is assumed to be in this host's zone. Raises TopologyError where the text does not describe the job.
    """
    try:
        attributes = _attributes(text, job_id)
        submitted_s, started_s = (
            datetime.strptime(attributes[name], "%a %b %d %H:%M:%S %Y").timestamp() if attributes.get(name) else None
            for name in ("ctime", "stime")
        )
        walltime = attributes.get("Resource_List", {}).get("walltime")
        limit_s = 0
        for part in str(walltime or 0).split(":"):  # `01:30:00`, `30:00` or `5400`
            limit_s = limit_s * 60 + int(part)
        ends_s = started_s + limit_s if started_s and limit_s else None
        gpus: dict[str, int] = {}
        # `(node1:ncpus=2:ngpus=2)+(node2[0]:ncpus=2:ngpus=1+node2[1]:ngpus=1)`: brackets number a node's parts.
        for name, resources in re.findall(r"([^()+:]+)([^()+]*)", attributes.get("exec_vnode", "")):
            node = name.partition("[")[0]
            gpus[node] = gpus.get(node, 0) + sum(map(int, re.findall(r":ngpus=(\d+)", resources)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TopologyError(
            f"`qstat -f -F json {job_id}` did not describe the job ({error!r}): {text[:200]!r}. Run it inside "
            "the job or as its owner, while the job exists"
        ) from error
    return Times(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin="stime, walltime of qstat -f"), gpus


FIRST_JOB = "SAMERUN_FIRST_JOB"
"""Variable: number of the job that started the run which this job continues."""
REQUEUES = "SAMERUN_REQUEUES"
"""Variable: number of jobs that have continued the run, this one included."""

# Variables of every login shell: `qsub -V` puts them into the list of a job's variables, and a new job gets its own.
_OF_A_LOGIN = {"HOME", "LANG", "LOGNAME", "MAIL", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "TZ", "USER", "_"}
# PBS adds these to a job that requested chunks (select=...), and refuses them together.
_OF_CHUNKS = {"mem", "mpiprocs", "ncpus", "ngpus", "nodect", "nodes", "ompthreads", "vmem"}


def find_job(
    environment: Mapping[str, str], *, describe_job: Callable[[str], str] = qstat, qsub: Callable[..., str] = ask
) -> Job | None:
    """Return the PBS job that `environment` is part of, or None outside PBS.

    `describe_job` returns the output of `qstat -f -F json`; `qsub` submits, as `ask` does, and returns the new id.
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


def _times(job_id: str, describe_job: Callable[[str], str]) -> Times:
    try:
        return parse_job(describe_job(job_id), job_id=job_id)[0]
    except (NotDoneError, TopologyError) as error:
        return Times(origin=str(error))


def _resubmit(
    environment: Mapping[str, str], describe_job: Callable[[str], str], qsub: Callable[..., str], signals: Collection[int]
) -> str:
    job_id = environment["PBS_JOBID"]
    ends_s = _times(job_id, describe_job).ends_s
    if signal.SIGTERM in signals and (ends_s is None or time.time() < ends_s):
        raise NotDoneError(f"PBS was ending job {job_id}, for example after qdel")
    if "[" in job_id:  # PBS_ARRAY_INDEX is less certain: a job that `qsub -V` submits in an array inherits it
        raise NotDoneError(f"job {job_id} is an array job, and PBS cannot resubmit one of its tasks")
    requeues = number(environment, REQUEUES) + 1
    try:
        attributes = _attributes(describe_job(job_id), job_id)
        command = successor(attributes, submitted_in=environment["PBS_O_WORKDIR"], requeues=requeues)
    except (ValueError, KeyError, TypeError) as error:
        raise NotDoneError(f"`qstat -f -F json {job_id}` does not describe the job ({error!r})") from error
    variables = {REQUEUES: str(requeues), FIRST_JOB: environment.get(FIRST_JOB, job_id.partition(".")[0])}
    return f"PBS job {qsub(command, **variables).strip()} continues it"


def successor(attributes: Mapping[str, Any], *, submitted_in: str, requeues: int) -> list[str]:
    """Return the qsub that submits a job like the one with these attributes, given by `qstat -f -F json`.

    `submitted_in` is the folder where qsub was called. A log with a name of its own gets another, with the number `requeues`,
    or it would be replaced. Variables are only named, their values come from qsub's environment: every user can read a
    command line, and PBS splits it at commas. Raises NotDoneError for a job without a script's file.
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
