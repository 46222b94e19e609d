"""A Slurm job: its `Allocation`, with every value and the variable it came from, its times, and how it is requeued.

A job's processes are started in two moves. `samerun launch` in a batch script or a shell of salloc starts one `srun` over
all nodes; each of its tasks, one a node, is `samerun launch` again, finds its own node rank, and starts that node's
`accelerate launch`. So nothing has to be filled in by a shell, which would do it once, on the first node, for all.

The variables, and how they are read: `app/environment/slurm_variables.py`. A task sees its step, everything else the job.

- `scontrol requeue` of an array's own id requeues every task, and the last task has that id as SLURM_JOB_ID: ARRAY_TASK it is.
- It also requeues a job that a user has just cancelled. A job that Slurm is ending is COMPLETING, whatever for; only `Restarts`
  shows that it is on its way into the queue.
- A requeued job waits 120 s (`batch_requeue_fini` in slurmctld), unless its StartTime is in the future by then: this can be
  set by the job itself, as soon as it has been requeued and while its processes still end.
- There is no SLURM_JOB_END_TIME before 23.02.
- With `sbatch --no-kill`, Slurm removes a node that it declares DOWN (after SlurmdTimeout, 300 s by default) from the job and
  kills the step that used it; the job keeps running on the others. The srun of that step ends only then, even if its tasks on
  the other nodes failed long before. A step that has --no-kill itself is not ended: its other tasks wait for the lost ones.
- If the lost node is the first, nothing runs the batch script any more, and the job idles to its time limit (`guard`).
"""

from __future__ import annotations

import functools
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from app.environment.slurm_variables import JOB, STEP, UNSET, Slurm, hosts_of, is_in_step, is_shell
from app.environment.topology import HOST_SUFFIX, Topology, number, port_of_job, short, with_suffix
from app.errors import TopologyError
from launch.schedulers.hosts import ATTEMPT, Allocation, Job, NotDoneError, Times, ask, count_accelerators, uneven

_HOLD_S = 15
"""Seconds in the queue before the next start: time enough for the job's last processes and its epilog. If they take
longer, Slurm holds the job for its 120 s."""
_GUARD_EVERY_S = 30.0
"""Time between two requests of a guard to slurmctld."""

Scontrol = Callable[[Sequence[str]], str]
"""Runs scontrol with these arguments and returns what it prints. Raises NotDoneError with its error output if it fails."""


def run_scontrol(arguments: Sequence[str]) -> str:
    """Run scontrol, which then prints times in Unix seconds."""
    return ask(["scontrol", *arguments], SLURM_TIME_FORMAT="%s")


def find(
    environment: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    nodes: int | None = None,
    hostname: str | None = None,
    has_srun: bool | None = None,
    scontrol: Scontrol = run_scontrol,
) -> Allocation | None:
    """Return the allocation that `environment` is part of, or None outside Slurm.

    `processes_per_node` is --processes-per-node, `nodes` is --nodes. Defaults are found here: this machine's name and whether
    there is an srun. `scontrol` is called only in the shell of salloc, where no variable holds the GPUs of a node. Raises
    TopologyError if the variables are left over from a job or copied, the GPUs of the nodes differ, or this is one of several
    tasks of its node.
    """
    if JOB.job_id not in environment:
        return None
    slurm = Slurm.of(environment)
    has_srun = shutil.which("srun") is not None if has_srun is None else has_srun
    _check(slurm, hostname or socket.gethostname(), has_srun)
    num_nodes, hosts = slurm.number(slurm.names.num_nodes), slurm.hosts()
    gpus = _gpus_per_node(slurm, num_nodes, processes_per_node, scontrol)
    processes = _processes(slurm, processes_per_node, *gpus)
    head, head_origin = with_suffix(hosts[0], environment), f"first of {slurm.said(slurm.names.hosts)}"
    found: dict[str, tuple[Any, str]] = {
        "num_nodes": (num_nodes, slurm.said(slurm.names.num_nodes)),
        "processes_per_node": processes,
        "node_rank": (slurm.number(JOB.node_rank), slurm.said(JOB.node_rank)) if slurm.in_task else (0, "the first node"),
        "head_address": (head, head_origin if head == hosts[0] else f"{head_origin}, {slurm.said(HOST_SUFFIX)}"),
        "port": _port(slurm) if num_nodes > 1 else (0, "one node: any that is free"),
        "hosts": (hosts, slurm.said(slurm.names.hosts)),
        "threads_per_process": _threads(slurm, processes[0]),
    }
    values = {name: value for name, (value, _) in found.items()}
    topology = Topology(**values, origins={name: origin for name, (_, origin) in found.items()}).on_first(nodes)
    job = Allocation(scheduler=f"Slurm job {slurm.number(JOB.job_id)}", topology=topology, is_task=slurm.in_task)
    if slurm.in_task:
        return job
    start, start_origin = _srun(slurm, topology.num_nodes, min(gpus[0], topology.processes_per_node))
    return replace(job, start=start, start_origin=start_origin)


def _check(slurm: Slurm, hostname: str, has_srun: bool) -> None:
    job, node = slurm.said(JOB.job_id), slurm.environment.get(JOB.node, "")
    if not has_srun and ATTEMPT not in slurm.environment and (not slurm.in_task or short(node) != short(hostname)):
        raise TopologyError(
            f"{slurm.said(JOB.job_id, JOB.node)}, but this machine is {hostname} and has no srun: the variables are left over "
            f"from a job, or were copied. {UNSET}"
        )
    if slurm.environment.get(JOB.het_size, "1") != "1":
        raise TopologyError(
            f"{job} is a heterogeneous job ({slurm.said(JOB.het_size)}): a run needs the same number of "
            "processes on every node. Request one kind of node, with sbatch --nodes=N"
        )
    if slurm.in_task and slurm.number(JOB.step_num_tasks) > slurm.number(JOB.step_num_nodes):
        raise TopologyError(
            f"srun started {slurm.number(JOB.step_num_tasks)} tasks ({slurm.said(STEP.tasks_per_node)}), and "
            "each would start all processes of its node. Use `srun --ntasks-per-node=1 samerun launch ...`, "
            "or leave out srun: in a batch script or salloc, `samerun launch` calls srun itself"
        )


def _gpus_per_node(slurm: Slurm, num_nodes: int, asked: int | None, scontrol: Scontrol) -> tuple[int, str]:
    """Return the GPUs of each node, or 0, and their origin. With `asked`, nodes need not have the same number."""
    environment = slurm.environment
    if slurm.in_task and "CUDA_VISIBLE_DEVICES" in environment:
        gpus, origin = count_accelerators(environment)
    elif JOB.gpus_on_node in environment and not slurm.in_salloc:
        gpus, origin = slurm.gpus(JOB.gpus_on_node), slurm.said(JOB.gpus_on_node)
    elif JOB.gpus_per_node in environment:
        return slurm.gpus(JOB.gpus_per_node), slurm.said(JOB.gpus_per_node)
    elif JOB.gpus_per_task in environment:
        least = slurm.gpus(JOB.gpus_per_task) * slurm.least(JOB.tasks_per_node)
        origin = slurm.said(JOB.gpus_per_task, JOB.tasks_per_node)
        if len(set(slurm.counts(JOB.tasks_per_node))) > 1 and asked is None:
            raise uneven(origin, least)
        return least, origin
    elif slurm.in_salloc:
        return _gpus_in_description(slurm.number(JOB.job_id), asked, scontrol)
    else:
        return 0, "no GPU in the allocation"
    total = slurm.gpus(JOB.gpus) if JOB.gpus in environment else gpus * num_nodes
    whole_job = slurm.number(slurm.names.num_nodes) == slurm.number(JOB.num_nodes)
    if gpus and whole_job and total != gpus * num_nodes and asked is None:
        raise uneven(f"{slurm.said(JOB.gpus)}, and {origin} here", 1)
    return gpus, origin


def _gpus_in_description(job_id: int, asked: int | None, scontrol: Scontrol) -> tuple[int, str]:
    """Return the GPUs of each node and their origin: `scontrol show --details job`.

    Its lines are such as `Nodes=node1 ... GRES=gpu:a100:4(IDX:0-3)`.
    """
    try:
        text = scontrol(["show", "--details", "job", str(job_id)])
    except NotDoneError as error:
        raise TopologyError(f"{JOB.job_id} is {job_id}, but {error}. If the job is over, leave its shell. {UNSET}") from error
    lines = re.findall(r"^\s*Nodes=\S+ .*\bGRES=(.*)$", text, flags=re.MULTILINE)
    counts = {sum(int(number) for number in re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", line)) for line in lines} or {0}
    if len(counts) > 1 and asked is None:
        raise uneven(f"scontrol show job: {', '.join(map(str, sorted(counts)))}", min(counts))
    return min(counts), "scontrol show job"


def _processes(slurm: Slurm, asked: int | None, gpus: int, gpus_origin: str) -> tuple[int, str]:
    if asked is not None:
        if gpus and asked > gpus:
            node = slurm.environment.get(JOB.node, "a node")
            raise TopologyError(
                f"--processes-per-node is {asked}, but {node} has {gpus} GPUs for this run ({gpus_origin}): use at most {gpus}"
            )
        return asked, "--processes-per-node"
    if gpus:
        return gpus, gpus_origin
    if JOB.tasks_asked_per_node in slurm.environment:
        return slurm.number(JOB.tasks_asked_per_node), f"{slurm.said(JOB.tasks_asked_per_node)}; {gpus_origin}"
    return 1, f"{gpus_origin}; --processes-per-node says otherwise"


def _threads(slurm: Slurm, processes: int) -> tuple[int | None, str]:
    """Return the CPU threads of each process, the same on every node: its share of the CPUs of the smallest node."""
    if "OMP_NUM_THREADS" in slurm.environment:
        return None, slurm.said("OMP_NUM_THREADS")
    cpus, origin = _cpus_per_node(slurm)
    return max(cpus // processes, 1), f"{origin}, divided by the processes"


def _cpus_per_node(slurm: Slurm) -> tuple[int, str]:
    if JOB.cpus_per_task not in slurm.environment:
        return slurm.least(JOB.cpus_per_node), slurm.said(JOB.cpus_per_node)
    tasks = slurm.names.tasks_per_node
    return slurm.number(JOB.cpus_per_task) * slurm.least(tasks), slurm.said(JOB.cpus_per_task, tasks)


def _port(slurm: Slurm) -> tuple[int, str]:
    """Return a port that every task computes alike, different for each job, as jobs share nodes, and for each step."""
    step = slurm.number(JOB.step_id) if slurm.in_task else 0
    port = port_of_job(slurm.number(JOB.job_id), step, apart=7919)  # far from the next jobs' ports
    return port, slurm.said(JOB.job_id, JOB.step_id) if slurm.in_task else f"{slurm.said(JOB.job_id)}, its first step"


def _srun(slurm: Slurm, num_nodes: int, gpus: int) -> tuple[tuple[str, ...], str]:
    """Return the srun that starts one task on every node with all resources of the job there, whatever its tasks.

    It overrides the job's own options that reach srun by environment variables: fewer CPUs or GPUs, other numbers of tasks, or
    an empty environment.
    """
    environment = slurm.environment
    options = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    # Without --disable-status srun keeps the first Ctrl-C to itself.
    options += ["--export=ALL", "--cpu-bind=none", "--disable-status"]
    options.append("--mem=0")  # all that the job has there; SLURM_MEM_PER_NODE may be that of the job this one was submitted in
    if JOB.cpus_per_task in environment:
        options.append(f"--cpus-per-task={_cpus_per_node(slurm)[0]}")
    if gpus:  # a step of a job that has its GPUs by --exclusive gets none unless it requests them
        options += [f"--gpus-per-node={gpus}", "--gpu-bind=none"]
    if is_in_step(environment):  # a shell that srun opened holds what it was given until it ends
        options.append("--overlap")
        return ("srun", *options), "this shell is on one node only"
    where = "the shell of salloc is on no node of the job" if slurm.in_salloc else "a batch script runs on the first node only"
    return ("srun", *options), where


def on_hosts(allocation: Allocation, hosts: Sequence[str], environment: Mapping[str, str]) -> Allocation:
    """Return the allocation on these of its nodes, where an earlier step may still be ending.

    Slurm keeps the resources of a step until all its nodes have confirmed its end or are DOWN: --overlap shares them.
    """
    changed, count = ("--nodes=", "--ntasks=", "--nodelist=", "--overlap"), len(hosts)
    start = [word for word in allocation.start if not word.startswith(changed)]
    start += [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(hosts)}", "--overlap"]
    head = with_suffix(hosts[0], environment)
    topology = replace(allocation.topology, num_nodes=count, hosts=tuple(hosts), head_address=head)
    return replace(allocation, topology=topology, start=tuple(start))


def guard(first_node: str, job_id: str, name: str, requeues: int) -> None:
    """Wait until Slurm has removed the first node from the job, then requeue the job. `requeues` counts its earlier requeues.

    `name` is the job's id or, of a task of an array, `14_3`.
    """
    while True:
        with suppress(NotDoneError, KeyError):  # slurmctld might be restarting
            if first_node not in hosts_of(_fields(job_id, run_scontrol)["NodeList"]):
                _requeue(job_id, name, requeues, run_scontrol, ())
                return
        time.sleep(_GUARD_EVERY_S)


def find_job(environment: Mapping[str, str], *, scontrol: Scontrol = run_scontrol) -> Job | None:
    """Return the Slurm job that `environment` is part of, or None outside Slurm.

    `scontrol` runs the program of that name. It is called here only in an array and in a requeued job, as a job that is
    submitted there inherits their variables; otherwise when the times are needed.
    """
    if JOB.job_id not in environment:
        return None
    job_id = environment[JOB.job_id]
    in_shell = is_shell(environment)
    in_step = is_in_step(environment) and not in_shell
    in_script = not in_step and not in_shell and JOB.node in environment  # the shell of salloc is on no node

    @functools.cache
    def at_start() -> tuple[dict[str, str], str]:
        """Return the fields of the job, or none and the reason. The tasks do not ask: what started them has asked."""
        try:
            return ({}, "a task does not ask") if in_step else (_fields(job_id, scontrol), "")
        except NotDoneError as error:
            return {}, str(error)

    name, requeues = job_id, 0
    if JOB.array_job_id in environment:
        inherited = {"ArrayJobId": environment[JOB.array_job_id], "ArrayTaskId": environment[JOB.array_task_id]}
        fields = at_start()[0] or inherited
        # Without them, a task of another array submitted this job, which inherited the variables.
        name = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if "ArrayJobId" in fields else job_id
    if JOB.restarts in environment:
        requeues = int(at_start()[0].get("Restarts", number(environment, JOB.restarts)))
    return Job(
        # Steps of one job that run at the same time are different runs.
        name=f"{name}.{environment[JOB.step_id]}" if in_step else name,
        times=lambda: _times(environment, *at_start()),
        requeues=requeues,
        requeue=functools.partial(_requeue, job_id, name, requeues, scontrol) if in_script else None,
    )


def _fields(job_id: str, scontrol: Scontrol) -> dict[str, str]:
    """Return the fields that `scontrol show job` prints, times in Unix seconds; of those with the same name the first.

    The number of an array, which is also its last task's, stands for all its tasks: a line for each. A task is found by its own
    number. Raises NotDoneError.
    """
    for line in scontrol(["--oneliner", "show", "job", job_id]).splitlines():
        fields = dict(reversed(re.findall(r"(\w+)=(\S+)", line)))
        if fields.get("JobId") == job_id:
            return fields
    raise NotDoneError(f"`scontrol show job {job_id}` does not show it")


def _times(environment: Mapping[str, str], fields: Mapping[str, str], why_not: str) -> Times:
    if fields:
        submitted_s, started_s, ends_s = (_moment(fields.get(f"{name}Time", "")) for name in ("Submit", "Start", "End"))
        return Times(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin="scontrol show job")
    start, end = (environment.get(name, "") for name in (JOB.started, JOB.ends))
    origin = f"{JOB.ends}={end}" if end else f"{JOB.ends} is not set; {why_not}"
    return Times(started_s=_moment(start), ends_s=_moment(end), origin=origin)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None  # `Unknown`, or nothing


def _requeue(job_id: str, name: str, requeues: int, scontrol: Scontrol, _signals: Collection[int]) -> str:
    """Put the job back into the queue, unless that has been done, or it was cancelled."""
    fields = _fields(job_id, scontrol)
    again = f"Slurm requeues job {name}"
    if int(fields.get("Restarts", "0")) > requeues:
        again = f"job {name} has already been requeued by Slurm"
    elif fields.get("JobState") == "RUNNING" or _is_at_its_limit(fields):
        scontrol(["requeue", name])
    else:
        raise NotDoneError(f"Slurm was ending job {name}, for example after scancel")
    with suppress(NotDoneError):  # then it waits for 2 minutes
        scontrol(["update", f"JobId={name}", f"StartTime=now+{_HOLD_S}"])
    return again


def _is_at_its_limit(fields: Mapping[str, str]) -> bool:
    """Return whether Slurm ends the job for its time limit: EndTime is then the moment when it began to."""
    limit = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", fields.get("TimeLimit", ""))
    started_s, ended_s = _moment(fields.get("StartTime", "")), _moment(fields.get("EndTime", ""))
    if limit is None or started_s is None or ended_s is None:
        return False
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
    return ended_s - started_s >= ((days * 24 + hours) * 60 + minutes) * 60 + seconds
