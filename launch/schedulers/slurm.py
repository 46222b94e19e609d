"""A Slurm job as an `Allocation`: environment in, topology out, and every value with the variable it came from.

A job's processes are started in two moves. `samerun launch` in a batch script or a shell of salloc starts one `srun` over
all nodes; each of its tasks, one a node, is `samerun launch` again, finds its own node rank, and starts that node's
`accelerate launch`. So nothing has to be filled in by a shell, which would do it once, on the first node, for all.

What was only inherited from another job has been taken out (`app/place/inherited.py`). The others, and which of them lie:
sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; tests/environments/slurm holds real ones. HOSTNAME in a task is the
batch host's; the shell of salloc is told nothing of its GPUs.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from app.errors import TopologyError
from app.place.environment import HOST_SUFFIX, said, with_suffix
from app.place.topology import Topology
from launch.schedulers.allocation import Allocation
from launch.schedulers.local import count_accelerators

# Below the ports that Linux hands out by itself (32768 and up); two jobs meet only if their ids differ by a multiple of 20000.
_FIRST_PORT, _PORTS = 12000, 20000


@dataclass(frozen=True)
class _View:
    """Where the values stand: a task sees its step, everything else the job."""

    environment: Mapping[str, str]
    in_task: bool

    def name(self, what: str) -> str:
        return f"SLURM_{'STEP' if self.in_task else 'JOB'}_{what}"

    @property
    def job_id(self) -> int:
        return self.number("SLURM_JOB_ID")

    @property
    def in_shell(self) -> bool:
        """Whether this is the shell of salloc: not on a node of the job as far as it knows, and told nothing of its GPUs."""
        return "SLURMD_NODENAME" not in self.environment

    def number(self, name: str) -> int:
        """Value of a variable that must be there, such as 2; a type may go before it, as in `a100:2`."""
        value = self.environment.get(name)
        if value is None:
            raise TopologyError(f"SLURM_JOB_ID is set, but {name} is not: this is no environment that Slurm made. {_UNSET}")
        found = re.fullmatch(r"(?:.*:)?(\d+)", value)
        if not found:
            raise TopologyError(f"{name} is {value!r}: it must be a whole number. {_UNSET}")
        return int(found[1])

    def said(self, *names: str) -> str:
        """The variables with their values, for messages: `SLURM_NODEID=1`."""
        return said(self.environment, *names)


_UNSET = "To run on this machine only, whatever Slurm's variables say: env -u SLURM_JOB_ID samerun launch ..."


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
    if "SLURM_JOB_ID" not in environment:
        return None
    view = _View(environment, in_task=is_task(environment))
    has_srun = shutil.which("srun") is not None if has_srun is None else has_srun
    _refuse_what_cannot_be(view, hostname or socket.gethostname(), has_srun)
    num_nodes = view.number(view.name("NUM_NODES"))
    gpus = _gpus_per_node(view, num_nodes, processes_per_node, describe_job or _scontrol)
    topology = _topology(view, num_nodes, _processes(view, processes_per_node, *gpus)).on_first(nodes)
    start, start_origin = (
        ((), "") if view.in_task else _srun(view, topology.num_nodes, min(gpus[0], topology.processes_per_node))
    )
    return Allocation(
        scheduler=f"Slurm job {view.job_id}",
        topology=topology,
        start=start,
        start_origin=start_origin,
        is_task=view.in_task,
    )


def _topology(view: _View, num_nodes: int, processes: tuple[int, str]) -> Topology:
    hosts = _hosts(view)
    node_rank = (view.number("SLURM_NODEID"), view.said("SLURM_NODEID")) if view.in_task else (0, "the first node")
    _refuse_other_order(view, hosts, node_rank[0])
    found: dict[str, tuple[Any, str]] = {
        "num_nodes": (num_nodes, view.said(view.name("NUM_NODES"))),
        "processes_per_node": processes,
        "node_rank": node_rank,
        "head_address": _head(view, hosts),
        "port": _port(view) if num_nodes > 1 else (0, "one node: any that is free"),
        "hosts": (hosts, view.said(view.name("NODELIST"))),
        "threads_per_process": _threads(view, processes[0]),
    }
    values = {name: value for name, (value, _) in found.items()}
    return Topology(**values, origins={name: origin for name, (_, origin) in found.items()})


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as (one of) the tasks of a run. On one node a shell that it opened is as good."""
    return "SLURM_STEP_ID" in environment and (not is_shell(environment) or environment.get("SLURM_JOB_NUM_NODES") == "1")


def is_shell(environment: Mapping[str, str]) -> bool:
    """Whether this is a shell that srun opened (--pty), or that salloc opened on a node of the job."""
    return "SLURM_PTY_PORT" in environment and environment.get("SLURM_STEP_NUM_TASKS") == "1"


def _refuse_what_cannot_be(view: _View, hostname: str, has_srun: bool) -> None:
    environment = view.environment
    job = view.said("SLURM_JOB_ID")
    node = environment.get("SLURMD_NODENAME", "")
    if not has_srun and (not view.in_task or _short(node) != _short(hostname)):
        there = f"SLURMD_NODENAME={node}, but this machine is {hostname}" if node else f"this machine is {hostname}"
        raise TopologyError(
            f"{job} is set, {there} and has no srun: the variables are left over from a job, or were copied. {_UNSET}"
        )
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise TopologyError(
            f"{job} is a heterogeneous job ({view.said('SLURM_HET_SIZE')}): a run needs the same processes on every node. "
            "Ask for one kind of node, with sbatch --nodes=N"
        )
    if view.in_task and view.number("SLURM_STEP_NUM_TASKS") > view.number("SLURM_STEP_NUM_NODES"):
        raise TopologyError(
            f"srun started {view.number('SLURM_STEP_NUM_TASKS')} tasks ({view.said('SLURM_STEP_TASKS_PER_NODE')}), and each "
            "would start all processes of its node. Use `srun --ntasks-per-node=1 samerun launch ...`, or leave out srun: "
            "`samerun launch` in a batch script or salloc calls it rightly"
        )


def _short(name: str) -> str:
    return name.partition(".")[0]


def _hosts(view: _View) -> tuple[str, ...]:
    """Names in the order of the node ranks, which is Slurm's and not the alphabet's: `node[3,1]` is node3, node1."""
    from hostlist import BadHostlist, expand_hostlist  # only in Slurm's jobs, so that elsewhere nothing asks for it

    name = view.name("NODELIST")
    try:
        return tuple(expand_hostlist(view.environment.get(name, "")))
    except BadHostlist as error:
        raise TopologyError(f"{name} is {view.environment[name]!r}, which is no list of nodes: {error}. {_UNSET}") from error


def _refuse_other_order(view: _View, hosts: tuple[str, ...], node_rank: int) -> None:
    node = view.environment.get("SLURMD_NODENAME")
    if view.in_task and node in hosts and (node == hosts[0]) != (node_rank == 0):
        raise TopologyError(
            f"{view.said('SLURM_NODEID', 'SLURMD_NODENAME')}, but {view.said(view.name('NODELIST'))}: node 0 is not the first "
            "of the list, where the others would look for it. Leave out --distribution=arbitrary and SLURM_HOSTFILE"
        )


def _gpus_per_node(view: _View, num_nodes: int, asked: int | None, describe_job: Callable[[int], str]) -> tuple[int, str]:
    """Return the GPUs of each node, 0 for none, and where that stands. With `asked`, nodes need not have the same number."""
    environment = view.environment
    if view.in_task and "CUDA_VISIBLE_DEVICES" in environment:
        gpus, origin = count_accelerators(environment)
    elif "SLURM_GPUS_ON_NODE" in environment and not view.in_shell:
        gpus, origin = view.number("SLURM_GPUS_ON_NODE"), view.said("SLURM_GPUS_ON_NODE")
    elif "SLURM_GPUS_PER_NODE" in environment:
        return view.number("SLURM_GPUS_PER_NODE"), view.said("SLURM_GPUS_PER_NODE")
    elif "SLURM_GPUS_PER_TASK" in environment:
        tasks = _counts(environment.get("SLURM_TASKS_PER_NODE", "1"))
        per_task = view.number("SLURM_GPUS_PER_TASK")
        if len(set(tasks)) > 1 and asked is None:
            least = per_task * min(tasks)
            _refuse_uneven(view.said("SLURM_GPUS_PER_TASK", "SLURM_TASKS_PER_NODE"), num_nodes, even=least, least=least)
        return per_task * min(tasks), view.said("SLURM_GPUS_PER_TASK", "SLURM_TASKS_PER_NODE")
    elif view.in_shell:
        return _gpus_in_description(describe_job(view.job_id), num_nodes, asked)
    else:
        return 0, "no GPU in the allocation"
    total = view.number("SLURM_GPUS") if "SLURM_GPUS" in environment else gpus * num_nodes
    whole_job = view.number(view.name("NUM_NODES")) == view.number("SLURM_JOB_NUM_NODES")
    if gpus and whole_job and total != gpus * num_nodes and asked is None:
        _refuse_uneven(f"{view.said('SLURM_GPUS')}, and {origin} here", num_nodes, even=total // num_nodes, least=1)
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
        f"the {num_nodes} nodes have different numbers of GPUs ({origin}), and Accelerate deals the processes evenly: "
        f"ask for --gpus-per-node={max(even, 1)}, or leave GPUs idle with `samerun launch --processes-per-node {upto}`"
    )


def _processes(view: _View, asked: int | None, gpus: int, gpus_origin: str) -> tuple[int, str]:
    if asked is not None:
        if gpus and asked > gpus:
            node = view.environment.get("SLURMD_NODENAME", "a node")
            raise TopologyError(
                f"--processes-per-node is {asked}, but {node} has {gpus} GPUs for this run "
                f"({gpus_origin}): use at most {gpus}, on every node"
            )
        return asked, "--processes-per-node"
    if gpus:
        return gpus, gpus_origin
    if "SLURM_NTASKS_PER_NODE" in view.environment:
        return view.number("SLURM_NTASKS_PER_NODE"), f"{view.said('SLURM_NTASKS_PER_NODE')}; {gpus_origin}"
    return 1, f"{gpus_origin}; --processes-per-node says otherwise"


def _threads(view: _View, processes: int) -> tuple[int | None, str]:
    """CPU threads of each process: its share of the CPUs of the node that has least, so that it is the same on every node."""
    if "OMP_NUM_THREADS" in view.environment:
        return None, view.said("OMP_NUM_THREADS")
    cpus, origin = _cpus_per_node(view)
    return max(cpus // processes, 1), f"{origin}, divided by the processes"


def _cpus_per_node(view: _View) -> tuple[int, str]:
    if "SLURM_CPUS_PER_TASK" not in view.environment:
        return min(_counts(view.environment.get("SLURM_JOB_CPUS_PER_NODE", "1"))), view.said("SLURM_JOB_CPUS_PER_NODE")
    tasks = "SLURM_STEP_TASKS_PER_NODE" if view.in_task else "SLURM_TASKS_PER_NODE"
    number = view.number("SLURM_CPUS_PER_TASK") * min(_counts(view.environment.get(tasks, "1")))
    return number, view.said("SLURM_CPUS_PER_TASK", tasks)


def _counts(text: str) -> list[int]:
    """The different numbers in `4(x2),1`: 4 and 1."""
    return [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)] or [1]


def _head(view: _View, hosts: tuple[str, ...]) -> tuple[str, str]:
    if not hosts:
        return "", "no list of nodes"
    head, origin = with_suffix(hosts[0], view.environment), f"first of {view.said(view.name('NODELIST'))}"
    return head, origin if head == hosts[0] else f"{origin}, {view.said(HOST_SUFFIX)}"


def _port(view: _View) -> tuple[int, str]:
    """A port that every task works out alike: of its own for each job, as jobs share nodes, and for each step of a job."""
    step = view.number("SLURM_STEP_ID") if view.in_task else 0
    # 7919 is prime to 20000: the steps of a job all differ, and those of the next jobs are far away.
    port = _FIRST_PORT + (view.job_id + 7919 * step) % _PORTS
    return port, view.said("SLURM_JOB_ID", "SLURM_STEP_ID") if view.in_task else f"{view.said('SLURM_JOB_ID')}, its first step"


def _srun(view: _View, num_nodes: int, gpus: int) -> tuple[tuple[str, ...], str]:
    """The srun that starts one task on every node with all that the job has there, whatever tasks the job was divided into.

    What the job's own options would hand on to srun by environment variables is said anew: fewer CPUs or GPUs, other numbers
    of tasks, or an empty environment.
    """
    environment = view.environment
    options = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"]
    # Without --disable-status srun keeps the first Ctrl-C to itself.
    options += ["--export=ALL", "--cpu-bind=none", "--disable-status"]
    options.append("--mem=0")  # all that the job has there; SLURM_MEM_PER_NODE may be that of the job this one was submitted in
    if "SLURM_CPUS_PER_TASK" in environment:
        options.append(f"--cpus-per-task={_cpus_per_node(view)[0]}")
    if gpus:  # a step of a job that has its GPUs by --exclusive gets none unless it says so
        options += [f"--gpus-per-node={gpus}", "--gpu-bind=none"]
    if "SLURM_STEP_ID" in environment:  # a shell that srun opened holds what it was given until it ends
        options.append("--overlap")
        return ("srun", *options), "this shell is on one node only"
    where = "the shell of salloc is on no node of the job" if view.in_shell else "a batch script runs on the first node only"
    return ("srun", *options), where


def _scontrol(job_id: int) -> str:
    command = ["scontrol", "show", "--details", "job", str(job_id)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise TopologyError(
            f"SLURM_JOB_ID is {job_id}, but `{' '.join(command)}` fails: {said}. If the job is over, leave its shell. {_UNSET}"
        ) from error
