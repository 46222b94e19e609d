"""A Slurm job: its `Allocation`, with every value and the variable it came from, its times, and how it is requeued.

A job's processes are started in two moves. `samerun launch` in a batch script or a shell of salloc starts one `srun` over
all nodes; each of its tasks, one a node, is `samerun launch` again, finds its own node rank, and starts that node's
`accelerate launch`. So nothing has to be filled in by a shell, which would do it once, on the first node, for all.

The variables, and how they are read: `app/environment/slurm_variables.py`. A task sees its step, everything else the job.

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
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from app.environment.slurm_variables import JOB, STEP, UNSET, Slurm, is_in_step, is_shell
from app.environment.topology import Topology
from app.environment.variables import HOST_SUFFIX, number, port_of_job, short, with_suffix
from app.errors import TopologyError
from launch.schedulers.job import Allocation, Job, NotDoneError, Requeued, Times, ask
from launch.schedulers.local import count_accelerators

_HOLD_S = 15
"""Seconds in the queue before the next start: time enough for the job's last processes and its epilog. If they take
longer, Slurm holds the job for its 120 s."""

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
    node = environment.get(JOB.node)
    if slurm.in_task and node in hosts and (node == hosts[0]) != (topology.node_rank == 0):
        raise TopologyError(
            f"{slurm.said(JOB.node_rank, JOB.node)}, but {slurm.said(slurm.names.hosts)}: node 0 is not the "
            "first of the list, but the others would look for it there. Do not use --distribution=arbitrary "
            "and SLURM_HOSTFILE"
        )
    start, start_origin = (
        ((), "") if slurm.in_task else _srun(slurm, topology.num_nodes, min(gpus[0], topology.processes_per_node))
    )
    return Allocation(
        scheduler=f"Slurm job {slurm.number(JOB.job_id)}",
        topology=topology,
        start=start,
        start_origin=start_origin,
        is_task=slurm.in_task,
    )


def _check(slurm: Slurm, hostname: str, has_srun: bool) -> None:
    environment = slurm.environment
    job = slurm.said(JOB.job_id)
    node = environment.get(JOB.node, "")
    if not has_srun and (not slurm.in_task or short(node) != short(hostname)):
        there = f"{slurm.said(JOB.node)}, but this machine is {hostname}" if node else f"this machine is {hostname}"
        raise TopologyError(
            f"{job} is set, {there} and has no srun: the variables are left over from a job, or were copied. {UNSET}"
        )
    if environment.get(JOB.het_size, "1") != "1":
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
            _refuse_uneven(origin, num_nodes, even=least, least=least)
        return least, origin
    elif slurm.in_salloc:
        return _gpus_in_description(slurm.number(JOB.job_id), num_nodes, asked, scontrol)
    else:
        return 0, "no GPU in the allocation"
    total = slurm.gpus(JOB.gpus) if JOB.gpus in environment else gpus * num_nodes
    whole_job = slurm.number(slurm.names.num_nodes) == slurm.number(JOB.num_nodes)
    if gpus and whole_job and total != gpus * num_nodes and asked is None:
        _refuse_uneven(f"{slurm.said(JOB.gpus)}, and {origin} here", num_nodes, even=total // num_nodes, least=1)
    return gpus, origin


def _gpus_in_description(job_id: int, num_nodes: int, asked: int | None, scontrol: Scontrol) -> tuple[int, str]:
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
        seen = f"scontrol show job: {', '.join(map(str, sorted(counts)))}"
        _refuse_uneven(seen, num_nodes, even=min(counts), least=min(counts))
    return min(counts), "scontrol show job"


def _refuse_uneven(origin: str, num_nodes: int, *, even: int, least: int) -> NoReturn:
    """Raise TopologyError; `even` GPUs per node can be requested instead, and every node has at least `least`."""
    upto = "1" if least <= 1 else f"1 to {least}"
    raise TopologyError(
        f"the {num_nodes} nodes have different numbers of GPUs ({origin}), but Accelerate starts the same "
        f"number of processes on every node: request --gpus-per-node={max(even, 1)}, or leave GPUs idle with "
        f"`samerun launch --processes-per-node {upto}`"
    )


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
    port = port_of_job(slurm.number(JOB.job_id), step, apart=7919)  # far from those of the next jobs
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


def find_job(environment: Mapping[str, str], *, scontrol: Scontrol = run_scontrol) -> Job | None:
    """Return the Slurm job that `environment` is part of, or None outside Slurm.

    `scontrol` runs the program of that name. It is called here only in an array and in a requeued job, as a job that is
    submitted there inherits their variables; otherwise when the times are needed.
    """
    if JOB.job_id not in environment:
        return None
    in_shell = is_shell(environment)
    in_step = is_in_step(environment) and not in_shell
    in_script = not in_step and not in_shell and JOB.node in environment  # the shell of salloc is on no node
    # The tasks do not all ask: what started them has asked.
    description = _Description(environment[JOB.job_id], None if in_step else scontrol)
    job_id, requeues = _job_id(environment, description), _requeues(environment, description)
    return Job(
        # Steps of one job that run at the same time are different runs.
        name=f"{job_id}.{environment[JOB.step_id]}" if in_step else job_id,
        times=functools.partial(_times, environment, description),
        requeues=requeues,
        requeue=functools.partial(_requeue, description, job_id, requeues, scontrol) if in_script else None,
    )


class _Description:
    """Fields of a job that `scontrol show job` prints, times in Unix seconds."""

    def __init__(self, number: str, scontrol: Scontrol | None) -> None:
        self._number, self._scontrol = number, scontrol

    def read(self) -> dict[str, str]:
        """Return the present fields; of those with the same name the first. Raises NotDoneError."""
        if self._scontrol is None:
            raise NotDoneError("a task does not ask")
        text = self._scontrol(["--oneliner", "show", "job", self._number])
        # The number of an array, which is also its last task's, stands for all its tasks: a line for each. A task is found by
        # its own number.
        jobs = [dict(reversed(re.findall(r"(\w+)=(\S+)", line))) for line in text.splitlines()]
        for fields in jobs:
            if fields.get("JobId") == self._number:
                return fields
        raise NotDoneError(f"`scontrol show job {self._number}` does not show it")

    @functools.cached_property
    def at_start(self) -> tuple[dict[str, str], str]:
        """The fields, read once, or none and the reason."""
        try:
            return self.read(), ""
        except NotDoneError as error:
            return {}, str(error)


def _job_id(environment: Mapping[str, str], description: _Description) -> str:
    if JOB.array_job_id not in environment:
        return environment[JOB.job_id]
    fields, _ = description.at_start
    if not fields:
        return f"{environment[JOB.array_job_id]}_{environment[JOB.array_task_id]}"
    # Without them, a task of another array submitted this job, which inherited the variables.
    return f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if "ArrayJobId" in fields else environment[JOB.job_id]


def _requeues(environment: Mapping[str, str], description: _Description) -> int:
    if JOB.restarts not in environment:
        return 0
    restarts = description.at_start[0].get("Restarts")
    return number(environment, JOB.restarts) if restarts is None else int(restarts)


def _times(environment: Mapping[str, str], description: _Description) -> Times:
    fields, why_not = description.at_start
    if fields:
        submitted_s, started_s, ends_s = (_moment(fields.get(f"{name}Time", "")) for name in ("Submit", "Start", "End"))
        return Times(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin="scontrol show job")
    start, end = (environment.get(name, "") for name in (JOB.started, JOB.ends))
    origin = f"{JOB.ends}={end}" if end else f"{JOB.ends} is not set; {why_not}"
    return Times(started_s=_moment(start), ends_s=_moment(end), origin=origin)


def _moment(text: str) -> float | None:
    return float(text) if text.isdecimal() else None  # `Unknown`, or nothing


def _requeue(description: _Description, job_id: str, requeues: int, scontrol: Scontrol, _signals: Collection[int]) -> Requeued:
    """Put the job back into the queue, unless that has been done, or it was cancelled."""
    fields = description.read()
    again = f"Slurm requeues job {job_id}"
    if int(fields.get("Restarts", "0")) > requeues:
        again = f"job {job_id} has already been requeued by Slurm"
    elif fields.get("JobState") == "RUNNING" or _is_at_its_limit(fields):
        scontrol(["requeue", job_id])
    else:
        raise NotDoneError(f"Slurm was ending job {job_id}, for example after scancel")
    try:
        scontrol(["update", f"JobId={job_id}", f"StartTime=now+{_HOLD_S}"])
    except NotDoneError as error:
        return Requeued(f"{again}, 2 minutes from now at the earliest ({error})")
    return Requeued(again)


def _is_at_its_limit(fields: Mapping[str, str]) -> bool:
    """Return whether Slurm ends the job for its time limit: EndTime is then the moment when it began to."""
    limit = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", fields.get("TimeLimit", ""))
    started_s, ended_s = _moment(fields.get("StartTime", "")), _moment(fields.get("EndTime", ""))
    if limit is None or started_s is None or ended_s is None:
        return False
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
    return ended_s - started_s >= ((days * 24 + hours) * 60 + minutes) * 60 + seconds
