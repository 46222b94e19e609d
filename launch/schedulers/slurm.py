"""A Slurm job as an `Allocation`: environment in, topology out, and every value with the variable it came from.

A job's processes are started in two moves. `samerun launch` in a batch script or a shell of salloc starts one `srun` over
all nodes; each of its tasks, one a node, is `samerun launch` again, finds its own node rank, and starts that node's
`accelerate launch`. So nothing has to be filled in by a shell, which would do it once, on the first node, for all.

The variables, and how they are read: `app/place/slurm_variables.py`. A task sees its step, everything else the job.
"""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from app.errors import TopologyError
from app.place.environment import HOST_SUFFIX, port_of_job, short, with_suffix
from app.place.slurm_variables import JOB, STEP, UNSET, Slurm, is_in_step
from app.place.topology import Topology
from launch.schedulers.allocation import Allocation
from launch.schedulers.job import NotDoneError, ask
from launch.schedulers.local import count_accelerators


def find(
    environment: Mapping[str, str],
    *,
    processes_per_node: int | None = None,
    nodes: int | None = None,
    hostname: str | None = None,
    has_srun: bool | None = None,
    describe_job: Callable[[int], str] | None = None,
) -> Allocation | None:
    """Return the allocation that `environment` is part of, or None outside Slurm.

    `processes_per_node` is --processes-per-node, `nodes` is --nodes. The rest is found where it is not given: this machine's
    name, whether there is an srun here, and what describes a job (`scontrol show job`, asked only in the shell of salloc,
    where no variable tells the GPUs of a node). Raises TopologyError where the variables are left over from a job or copied,
    the GPUs of the nodes differ, or this is one of several tasks of its node.
    """
    if JOB.job_id not in environment:
        return None
    slurm = Slurm.of(environment)
    has_srun = shutil.which("srun") is not None if has_srun is None else has_srun
    _refuse_what_cannot_be(slurm, hostname or socket.gethostname(), has_srun)
    num_nodes = slurm.number(slurm.names.num_nodes)
    gpus = _gpus_per_node(slurm, num_nodes, processes_per_node, describe_job or _describe)
    topology = _topology(slurm, num_nodes, _processes(slurm, processes_per_node, *gpus)).on_first(nodes)
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


def _topology(slurm: Slurm, num_nodes: int, processes: tuple[int, str]) -> Topology:
    hosts = slurm.hosts()
    node_rank = (slurm.number(JOB.node_rank), slurm.said(JOB.node_rank)) if slurm.in_task else (0, "the first node")
    _refuse_other_order(slurm, hosts, node_rank[0])
    found: dict[str, tuple[Any, str]] = {
        "num_nodes": (num_nodes, slurm.said(slurm.names.num_nodes)),
        "processes_per_node": processes,
        "node_rank": node_rank,
        "head_address": _head(slurm, hosts),
        "port": _port(slurm) if num_nodes > 1 else (0, "one node: any that is free"),
        "hosts": (hosts, slurm.said(slurm.names.hosts)),
        "threads_per_process": _threads(slurm, processes[0]),
    }
    values = {name: value for name, (value, _) in found.items()}
    return Topology(**values, origins={name: origin for name, (_, origin) in found.items()})


def _refuse_what_cannot_be(slurm: Slurm, hostname: str, has_srun: bool) -> None:
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


def _refuse_other_order(slurm: Slurm, hosts: tuple[str, ...], node_rank: int) -> None:
    node = slurm.environment.get(JOB.node)
    if slurm.in_task and node in hosts and (node == hosts[0]) != (node_rank == 0):
        raise TopologyError(
            f"{slurm.said(JOB.node_rank, JOB.node)}, but {slurm.said(slurm.names.hosts)}: node 0 is not the "
            "first of the list, but the others would look for it there. Do not use --distribution=arbitrary "
            "and SLURM_HOSTFILE"
        )


def _gpus_per_node(slurm: Slurm, num_nodes: int, asked: int | None, describe_job: Callable[[int], str]) -> tuple[int, str]:
    """Return the GPUs of each node, 0 for none, and where that stands. With `asked`, nodes need not have the same number."""
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
        if len({count for count, _ in slurm.counts(JOB.tasks_per_node)}) > 1 and asked is None:
            _refuse_uneven(origin, num_nodes, even=least, least=least)
        return least, origin
    elif slurm.in_salloc:
        return _gpus_in_description(describe_job(slurm.number(JOB.job_id)), num_nodes, asked)
    else:
        return 0, "no GPU in the allocation"
    total = slurm.gpus(JOB.gpus) if JOB.gpus in environment else gpus * num_nodes
    whole_job = slurm.number(slurm.names.num_nodes) == slurm.number(JOB.num_nodes)
    if gpus and whole_job and total != gpus * num_nodes and asked is None:
        _refuse_uneven(f"{slurm.said(JOB.gpus)}, and {origin} here", num_nodes, even=total // num_nodes, least=1)
    return gpus, origin


def _gpus_in_description(text: str, num_nodes: int, asked: int | None) -> tuple[int, str]:
    """GPUs of each node from `scontrol show --details job`, in lines such as `Nodes=node1 ... GRES=gpu:a100:4(IDX:0-3)`."""
    lines = re.findall(r"^\s*Nodes=\S+ .*\bGRES=(.*)$", text, flags=re.MULTILINE)
    counts = {sum(int(number) for number in re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", line)) for line in lines} or {0}
    if len(counts) > 1 and asked is None:
        seen = f"scontrol show job: {', '.join(map(str, sorted(counts)))}"
        _refuse_uneven(seen, num_nodes, even=min(counts), least=min(counts))
    return min(counts), "scontrol show job"


def _refuse_uneven(origin: str, num_nodes: int, *, even: int, least: int) -> NoReturn:
    """`even` GPUs a node may be asked for instead; every node is known to have `least`."""
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
    """CPU threads of each process: its share of the CPUs of the node that has least, so that it is the same on every node."""
    if "OMP_NUM_THREADS" in slurm.environment:
        return None, slurm.said("OMP_NUM_THREADS")
    cpus, origin = _cpus_per_node(slurm)
    return max(cpus // processes, 1), f"{origin}, divided by the processes"


def _cpus_per_node(slurm: Slurm) -> tuple[int, str]:
    if JOB.cpus_per_task not in slurm.environment:
        return slurm.least(JOB.cpus_per_node), slurm.said(JOB.cpus_per_node)
    tasks = slurm.names.tasks_per_node
    return slurm.number(JOB.cpus_per_task) * slurm.least(tasks), slurm.said(JOB.cpus_per_task, tasks)


def _head(slurm: Slurm, hosts: tuple[str, ...]) -> tuple[str, str]:
    if not hosts:
        return "", "no list of nodes"
    head, origin = with_suffix(hosts[0], slurm.environment), f"first of {slurm.said(slurm.names.hosts)}"
    return head, origin if head == hosts[0] else f"{origin}, {slurm.said(HOST_SUFFIX)}"


def _port(slurm: Slurm) -> tuple[int, str]:
    """A port that every task works out alike: of its own for each job, as jobs share nodes, and for each step of a job."""
    step = slurm.number(JOB.step_id) if slurm.in_task else 0
    port = port_of_job(slurm.number(JOB.job_id), step, apart=7919)  # far from those of the next jobs
    return port, slurm.said(JOB.job_id, JOB.step_id) if slurm.in_task else f"{slurm.said(JOB.job_id)}, its first step"


def _srun(slurm: Slurm, num_nodes: int, gpus: int) -> tuple[tuple[str, ...], str]:
    """The srun that starts one task on every node with all that the job has there, whatever tasks the job was divided into.

    What the job's own options would hand on to srun by environment variables is said anew: fewer CPUs or GPUs, other numbers
    of tasks, or an empty environment.
    """
    environment = slurm.environment
    options = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    # Without --disable-status srun keeps the first Ctrl-C to itself.
    options += ["--export=ALL", "--cpu-bind=none", "--disable-status"]
    options.append("--mem=0")  # all that the job has there; SLURM_MEM_PER_NODE may be that of the job this one was submitted in
    if JOB.cpus_per_task in environment:
        options.append(f"--cpus-per-task={_cpus_per_node(slurm)[0]}")
    if gpus:  # a step of a job that has its GPUs by --exclusive gets none unless it says so
        options += [f"--gpus-per-node={gpus}", "--gpu-bind=none"]
    if is_in_step(environment):  # a shell that srun opened holds what it was given until it ends
        options.append("--overlap")
        return ("srun", *options), "this shell is on one node only"
    where = "the shell of salloc is on no node of the job" if slurm.in_salloc else "a batch script runs on the first node only"
    return ("srun", *options), where


def _describe(job_id: int) -> str:
    try:
        return ask(["scontrol", "show", "--details", "job", str(job_id)])
    except NotDoneError as error:
        raise TopologyError(f"{JOB.job_id} is {job_id}, but {error}. If the job is over, leave its shell. {UNSET}") from error
