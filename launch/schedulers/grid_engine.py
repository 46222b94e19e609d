"""Grid Engine (SGE, Son of Grid Engine, Univa): a job's hosts as an `Allocation`.

Pure: the environment is a mapping passed in, files are read through a function passed in. Facts: 8.1.9.

- $PE_HOSTFILE, in jobs of a parallel environment (`qsub -pe NAME SLOTS`), has a line per host: name, slots, queue, processors.
  The batch script runs on the first. A job without one is this machine, whatever the number of its cores.
- What `qrsh -inherit` starts on a host is told its own slots only, and nothing of the other hosts. With -noshell it gets its
  arguments as they are; without, a shell takes them apart once more. qrsh ends with its exit code, 128 + n after a signal.
- SGE_TASK_ID is the text `undefined` outside of arrays.
- A script that ends with exit code 99 is run again, with RESTARTED=1 however often. No variable tells when its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from app.errors import TopologyError
from app.place.environment import END_TIME, number, port_of_job
from launch.schedulers import hosts
from launch.schedulers.allocation import Allocation
from launch.schedulers.job import Job, Requeued, Times
from launch.schedulers.local import count_accelerators


def find(
    environment: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    nodes: int | None = None,
    read: Callable[[str], str] = lambda path: Path(path).read_text(),
    device_folder: Path = Path("/dev"),
) -> Allocation | None:
    """Return the job that `environment` belongs to, seen from its batch script on the first host, or None outside of such jobs.

    Processes on a host are `processes_per_node` where given; else as many as GPUs visible here; else its slots. What
    `launch/start/spread.py` started on a host is not looked at here: it has been told (`hosts.find`). Raises TopologyError.
    """
    if hosts.NODE_RANK in environment or "SGE_ROOT" not in environment or "PE" not in environment:
        return None
    job_id = environment.get("JOB_ID", "")
    if environment.get("JOB_SCRIPT") == "QRSH" and "PE_HOSTFILE" not in environment:
        raise TopologyError(
            f"qrsh -inherit or mpirun started this process (JOB_ID={job_id}, JOB_SCRIPT=QRSH), and each such "
            "process would launch the whole run. Call `samerun launch` once, in the batch script"
        )
    slots = _count_slots(environment, read)
    here, origin = count_accelerators(environment, device_folder=device_folder)
    job = hosts.topology(
        slots,
        slots_origin="PE_HOSTFILE",
        accelerators=({"this host": here}, f"{origin} on this host"),
        asked=processes_per_node,
        port=_port(environment),
    )
    threads = max(min(slots.values()) // job.processes_per_node, 1), "slots of PE_HOSTFILE, divided by the processes"
    if "OMP_NUM_THREADS" in environment:
        threads = number(environment, "OMP_NUM_THREADS"), f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']}"
    return hosts.allocation(
        environment, f"Grid Engine job {job_id}", hosts.with_threads(job, *threads).on_first(nodes), starter="qrsh"
    )


def find_job(environment: Mapping[str, str]) -> Job | None:
    """Return the job that `environment` belongs to, as far as its return to the queue goes, or None outside of such jobs."""
    if "SGE_ROOT" not in environment or "PE" not in environment:
        return None
    job_id, task = environment.get("JOB_ID", ""), environment.get("SGE_TASK_ID", "undefined")
    return Job(
        name=job_id if task == "undefined" else f"{job_id}_{task}",
        times=lambda: Times.of(environment) if END_TIME in environment else Times(origin="Grid Engine does not tell"),
        requeues=number(environment, "RESTARTED"),
        requeue=None if hosts.NODE_RANK in environment else lambda _: Requeued(f"Grid Engine requeues job {job_id}", 99),
    )


def _count_slots(environment: Mapping[str, str], read: Callable[[str], str]) -> dict[str, int]:
    """Slots of each host, in the order of the file; a host may have lines for several queues."""
    path = environment.get("PE_HOSTFILE", "")
    slots: dict[str, int] = {}
    try:
        for line in read(path).splitlines():
            if line.strip():
                host, count, *_ = line.split()
                slots[host] = slots.get(host, 0) + int(count)
    except (OSError, ValueError) as error:
        raise TopologyError(
            f"JOB_ID is {environment.get('JOB_ID')}, but PE_HOSTFILE, {path!r}, cannot be read ({error}): if the variables are "
            "left over from another job, unset PE; else start the run from the batch script"
        ) from error
    if not slots:
        raise TopologyError(f"PE_HOSTFILE, {path}, is empty: a job has at least one host")
    return slots


def _port(environment: Mapping[str, str]) -> tuple[int, str]:
    task = environment.get("SGE_TASK_ID", "undefined")
    job_number = number(environment, "JOB_ID")
    if task == "undefined":
        return port_of_job(job_number), f"JOB_ID={job_number}"
    return port_of_job(job_number, number(environment, "SGE_TASK_ID")), f"JOB_ID={job_number}, SGE_TASK_ID={task}"
