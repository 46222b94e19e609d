"""Slurm's environment variables: one table of names, one way to read each kind, and removal of another job's or step's.

What was only inherited from another job is taken out before (`without_inherited`). The others, and which of them lie: sbatch(1)
and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; tests/environments/slurm holds real ones. HOSTNAME in a task is the batch host's;
the shell of salloc has no variable for its GPUs. Pure: the environment is a mapping passed in.

sbatch and salloc hand on the whole environment they are typed in, and set only what is the new job's over it. Typed inside a
job they leave the outer job's other variables: a batch script may have SLURM_STEP_ID and SLURM_STEP_NODELIST though it is no
step, the shell of salloc a SLURMD_NODENAME though it is on no node of its job. The variables themselves do not tell.

What cannot be inherited is where Slurm started the process: above it is a process `slurmstepd: [12.0]` or `[12.batch]`, and
its cgroup is `.../job_12/step_0/...` or `.../step_batch`. The first is seen unless /proc hides it (a PID namespace, hidepid)
or its child has ended; the second is there with ProctrackType=proctrack/cgroup, also in containers that have no cgroup
namespace. Where neither can be seen, the variables are believed.

Seen on Slurm 22.05 (tests/environments/slurm-nested), and in the source up to 26.11: sbatch.c and salloc.c take nothing out of
the environment but SLURM_STEPMGR, and slurmstepd.c, cgroup_v1 and cgroup_v2 write these names. Standard library only.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from app.environment.topology import said
from app.errors import TopologyError

_T = TypeVar("_T")


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
"""Variables of the whole job."""
STEP = Names(num_nodes=JOB.step_num_nodes, hosts="SLURM_STEP_NODELIST", tasks_per_node="SLURM_STEP_TASKS_PER_NODE")
"""Variables of the step that a task of srun is part of."""

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
        """Whether the values belong to a step."""
        return self.names == STEP

    @property
    def in_salloc(self) -> bool:
        """Whether this is the shell of salloc: not on a node of the job as far as it knows."""
        return JOB.node not in self.environment

    def number(self, name: str) -> int:
        """Value of a variable that must be there, such as 2. Raises TopologyError."""
        return self._parsed(name, _whole)

    def gpus(self, name: str) -> int:
        """Return the number of GPUs that a variable gives, of all types: 4 of `a100:2,h100:2`. Raises TopologyError."""
        return sum(self._parsed(name, gpus_of).values())

    def hosts(self) -> tuple[str, ...]:
        """Names in the order of the node ranks, which is Slurm's and not the alphabet's: `node[3,1]` is node3, node1.

        Raises TopologyError for a list that cannot be read.
        """
        return tuple(self._parsed(self.names.hosts, hosts_of))

    def _parsed(self, name: str, parse: Callable[[str], _T]) -> _T:
        value = self.environment.get(name)
        if value is None:
            raise TopologyError(f"{JOB.job_id} is set, but {name} is not: Slurm did not create this environment. {UNSET}")
        try:
            return parse(value)
        except ValueError as error:
            raise TopologyError(f"{name} is {value!r}: {error}. {UNSET}") from error

    def counts(self, name: str) -> list[int]:
        """Return the numbers of a variable for its nodes in their order: `4(x2),1` is 4, 4, 1."""
        numbers = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", self.environment.get(name, ""))
        return [int(count) for count, nodes in numbers for _ in range(int(nodes or 1))]

    def least(self, name: str) -> int:
        """Return the least of these numbers; 1 where there is none."""
        return min(self.counts(name), default=1)

    def said(self, *names: str) -> str:
        """The variables with their values, for messages: `SLURM_NODEID=1`."""
        return said(self.environment, *names)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("it must be a whole number")
    return int(text)


def hosts_of(listed: str) -> list[str]:
    """Return the names in Slurm's words for several nodes, in their order: `a,n[01-02,7]` is a, n01, n02, n7.

    Raises ValueError for other words.
    """
    part = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", listed):
        raise ValueError("it is not a list of nodes, such as node[01-03,7],login1")
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
    """Return True if srun started this process or a parent of it, also through a shell."""
    return JOB.step_id in environment


def is_shell(environment: Mapping[str, str]) -> bool:
    """Return True in a shell that srun opened (--pty), or that salloc opened on a node of the job."""
    return JOB.terminal_port in environment and environment.get(JOB.step_num_tasks) == "1"


def is_task(environment: Mapping[str, str]) -> bool:
    """Return True if srun started this process as (one of) the tasks of a run. On one node a shell that it opened is as
    good."""
    return is_in_step(environment) and (not is_shell(environment) or environment.get(JOB.num_nodes) == "1")


_GROUP = re.compile(r"/job_(\d+)/step_(\w+)")
_TITLE = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)\]")  # of a heterogeneous job: [12+1.0]
# What srun and slurmstepd set for a step. SLURM_STEPMGR is a setting of the cluster.
_OF_STEP = re.compile(r"SLURM_(STEP_\w+|STEPID|SRUN_COMM_\w+|LAUNCH_NODE_IPADDR|PTY_\w+)")
# The same, and what slurmd sets on a node for the process that it starts there: the shell of salloc has none of it.
_OF_NODE = re.compile(rf"{_OF_STEP.pattern}|SLURMD_NODENAME|SLURM_(NODEID|PROCID|LOCALID|GTIDS|TASK_PID|\w+_ON_NODE|JOB_GPUS)")
_OF_TERMINAL = re.compile(r"SLURM_PTY_\w+")
# What was requested, and what shows that it was: without the second, the first is another job's.
_GPUS_REQUESTED = re.compile(r"SLURM_GPUS|SLURM_GPUS_PER_(NODE|TASK|SOCKET)")
_GPUS_GIVEN = {"SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
_OF_PMI = re.compile(r"PMI_\w+")
# What Slurm's programs are set up with, in a job or not: sbatch(1), "INPUT ENVIRONMENT VARIABLES".
_SETTINGS = re.compile(r"SLURM_(CONF|CONF_SERVER|JWT|SACK_\w+|CLUSTERS|EXIT_ERROR|DEBUG_FLAGS|TIME_FORMAT)")


@dataclass(frozen=True)
class Origin:
    """The place where Slurm started a process."""

    job: str
    """Id of the job."""
    step: str
    """`0` and so on of a step, `batch` of a batch script, `interactive` of the shell that salloc opened on a node."""
    has_terminal: bool = True
    """False if the task of the step, which SLURM_TASK_PID names, was found and has no terminal."""


def own_environment() -> dict[str, str]:
    """Return the environment of this process without what it only inherited."""
    if JOB.job_id not in os.environ:
        return dict(os.environ)
    import psutil  # not at the top: the launcher starts immediately

    try:
        chain = [psutil.Process(), *psutil.Process().parents()]
        titles = [" ".join(process.cmdline()) for process in chain]
        lost = any(str(process.pid) == os.environ.get(JOB.pid) and process.terminal() is None for process in chain)
    except psutil.Error:  # hidden, or just ended
        titles, lost = [], False
    groups = Path("/proc/self/cgroup")
    origin = origin_of(titles, groups.read_text() if groups.exists() else "", has_terminal=not lost)
    return without_inherited(os.environ, origin)


def origin_of(titles: Sequence[str], cgroup: str, *, has_terminal: bool = True) -> Origin | None:
    """Return where Slurm started a process, from the titles of it and those above it, or from its cgroup. None: not visible."""
    by_title = [found.groups() for found in map(_TITLE.match, titles) if found]
    by_cgroup = _GROUP.findall(cgroup)[-1:]  # the innermost, where a cluster runs in another's job
    return next((Origin(job, step, has_terminal) for job, step in (*by_title, *by_cgroup)), None)


def without_inherited(environment: Mapping[str, str], origin: Origin | None) -> dict[str, str]:
    """Return `environment` without what a process of this origin (None: unknown, or not Slurm's) can only have inherited."""
    # The processes of a heterogeneous job have ids of several jobs; a login by ssh (`extern`) has set them by hand.
    if origin is None or origin.step == "extern" or JOB.job_id not in environment or JOB.het_size in environment:
        return dict(environment)
    stale, job = [], environment[JOB.job_id]
    in_salloc, in_batch = origin.job != job, origin.job == job and origin.step == "batch"
    if in_salloc or in_batch:
        stale.append(_OF_NODE if in_salloc else _OF_STEP)
        if in_salloc or not environment.keys() & _GPUS_GIVEN:
            stale.append(_GPUS_REQUESTED)
        counts = Slurm(environment, JOB).counts(JOB.tasks_per_node)  # `2(x3),1`, set anew for each job
        if counts and environment.get(JOB.tasks_asked_per_node) != str(max(counts)):
            stale.append(re.compile(JOB.tasks_asked_per_node))
    elif not origin.has_terminal:
        stale.append(_OF_TERMINAL)
    # Slurm's own PMI names the step, as in PMI_JOBID=12.0, and has ended with it.
    theirs = re.fullmatch(r"(\d+)\.\d+", environment.get("PMI_JOBID", ""))
    if theirs and theirs[1] != job:
        stale.append(_OF_PMI)
    return {name: value for name, value in environment.items() if not any(each.fullmatch(name) for each in stale)}


def for_a_new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be handed to sbatch: inside a job only what Slurm's programs are set up with, of all SLURM_ variables.

    Else its number of tasks, its GPUs, its memory and its place in an array would pass for the new job's.
    """
    if JOB.job_id not in environment:
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith("SLURM") or _SETTINGS.fullmatch(name)}
