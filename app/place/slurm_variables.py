"""What Slurm tells a process by variables: their names in one table, and one way to read each kind of value.

What was only inherited from another job is taken out before (`inherited.py`). The others, and which of them lie: sbatch(1) and
srun(1), "OUTPUT ENVIRONMENT VARIABLES"; tests/environments/slurm holds real ones. HOSTNAME in a task is the batch host's; the
shell of salloc is told nothing of its GPUs. Pure: the environment is a mapping passed in.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import TopologyError
from app.place.environment import said


@dataclass(frozen=True)
class Names:
    """The variable of each value."""

    num_nodes: str = "SLURM_JOB_NUM_NODES"
    hosts: str = "SLURM_JOB_NODELIST"
    tasks_per_node: str = "SLURM_TASKS_PER_NODE"
    job_id: str = "SLURM_JOB_ID"
    restarts: str = "SLURM_RESTART_COUNT"
    started: str = "SLURM_JOB_START_TIME"
    ends: str = "SLURM_JOB_END_TIME"
    het_size: str = "SLURM_HET_SIZE"
    array_job_id: str = "SLURM_ARRAY_JOB_ID"
    array_task_id: str = "SLURM_ARRAY_TASK_ID"
    step_id: str = "SLURM_STEP_ID"
    step_num_tasks: str = "SLURM_STEP_NUM_TASKS"
    step_num_nodes: str = "SLURM_STEP_NUM_NODES"
    terminal_port: str = "SLURM_PTY_PORT"
    node: str = "SLURMD_NODENAME"
    node_rank: str = "SLURM_NODEID"
    rank: str = "SLURM_PROCID"
    local_rank: str = "SLURM_LOCALID"
    pid: str = "SLURM_TASK_PID"
    tasks_asked_per_node: str = "SLURM_NTASKS_PER_NODE"
    cpus_per_node: str = "SLURM_JOB_CPUS_PER_NODE"
    cpus_per_task: str = "SLURM_CPUS_PER_TASK"
    cpus_on_node: str = "SLURM_CPUS_ON_NODE"
    gpus: str = "SLURM_GPUS"
    gpus_per_node: str = "SLURM_GPUS_PER_NODE"
    gpus_per_task: str = "SLURM_GPUS_PER_TASK"
    gpus_on_node: str = "SLURM_GPUS_ON_NODE"


JOB = Names()
"""Those of the whole job."""
STEP = Names(num_nodes=JOB.step_num_nodes, hosts="SLURM_STEP_NODELIST", tasks_per_node="SLURM_STEP_TASKS_PER_NODE")
"""Those of the step that a task of srun is part of."""

UNSET = f"To run on this machine only, whatever Slurm's variables say: env -u {JOB.job_id} samerun launch ..."
"""Remedy if the variables are left over from a job, or copied."""


@dataclass(frozen=True)
class Slurm:
    """An environment, read by names of the table."""

    environment: Mapping[str, str]
    names: Names

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Slurm:
        """Return what this process sees: a task of srun its step, everything else the job."""
        return cls(environment, STEP if is_task(environment) else JOB)

    @property
    def in_task(self) -> bool:
        """Whether the values are those of a step."""
        return self.names == STEP

    @property
    def in_salloc(self) -> bool:
        """Whether this is the shell of salloc: not on a node of the job as far as it knows, and told nothing of its GPUs."""
        return JOB.node not in self.environment

    def number(self, name: str) -> int:
        """Value of a variable that must be there, such as 2. Raises TopologyError."""
        value = self._value(name)
        if not (value.isascii() and value.isdecimal()):
            raise TopologyError(f"{name} is {value!r}: it must be a whole number. {UNSET}")
        return int(value)

    def gpus(self, name: str) -> int:
        """Return the number of GPUs that a variable gives, of all types: 4 of `a100:2,h100:2`. Raises TopologyError."""
        value = self._value(name)
        try:
            return sum(gpus_of(value).values())
        except ValueError as error:
            raise TopologyError(f"{name} is {value!r}: {error}. {UNSET}") from error

    def _value(self, name: str) -> str:
        value = self.environment.get(name)
        if value is None:
            raise TopologyError(f"{JOB.job_id} is set, but {name} is not: Slurm did not create this environment. {UNSET}")
        return value

    def counts(self, name: str) -> list[tuple[int, int]]:
        """Return the numbers of a variable for its nodes in their order: `4(x2),1` is 4 on 2 nodes, then 1 on one."""
        numbers = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", self.environment.get(name, ""))
        return [(int(count), int(nodes or 1)) for count, nodes in numbers]

    def first(self, name: str) -> int | None:
        """Return the number of the first node; None where there is none."""
        return next((count for count, _ in self.counts(name)), None)

    def least(self, name: str) -> int:
        """Return the least of these numbers; 1 where there is none."""
        return min((count for count, _ in self.counts(name)), default=1)

    def hosts(self) -> tuple[str, ...]:
        """Names in the order of the node ranks, which is Slurm's and not the alphabet's: `node[3,1]` is node3, node1.

        Raises TopologyError for a list that cannot be read.
        """
        listed = self.environment.get(self.names.hosts, "")
        try:
            return tuple(hosts_of(listed))
        except ValueError as error:
            raise TopologyError(f"{self.names.hosts} is {listed!r}, which is not a list of nodes: {error}. {UNSET}") from error

    def said(self, *names: str) -> str:
        """The variables with their values, for messages: `SLURM_NODEID=1`."""
        return said(self.environment, *names)


def hosts_of(listed: str) -> list[str]:
    """Return the names in Slurm's words for several nodes, in their order: `a,n[01-02,7]` is a, n01, n02, n7.

    Raises ValueError for other words.
    """
    part = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", listed):
        raise ValueError("expected names such as node[01-03,7],login1")
    names: list[str] = []
    for word in re.findall(part, listed):
        pieces = re.split(r"\[([^]]*)\]", word)  # text and numbers in turn
        choices = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        names += map("".join, itertools.product(*choices))
    return names


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"[{item}] counts down")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def gpus_of(text: str) -> dict[str, int]:
    """Return the number of GPUs of each type in Slurm's words: `4`, `a100:4`, `gpu:a100:4` or `a100:2,h100:2`.

    A number without a type has the type "". Raises ValueError for other words.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(?:gpu:)?(?:([\w.-]+):)?(\d+)", part, re.ASCII)
        if not found:
            raise ValueError("it must be a number of GPUs, such as 4, a100:4 or a100:2,h100:2")
        counts[found[1] or ""] = counts.get(found[1] or "", 0) + int(found[2])
    return counts


def is_in_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process or one above it, a shell among them."""
    return JOB.step_id in environment


def is_shell(environment: Mapping[str, str]) -> bool:
    """Whether this is a shell that srun opened (--pty), or that salloc opened on a node of the job."""
    return JOB.terminal_port in environment and environment.get(JOB.step_num_tasks) == "1"


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as (one of) the tasks of a run. On one node a shell that it opened is as good."""
    return is_in_step(environment) and (not is_shell(environment) or environment.get(JOB.num_nodes) == "1")
