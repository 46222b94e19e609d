"""The environment of a process in a Slurm job, without variables inherited from another job or step.

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

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.place.slurm_variables import JOB, Slurm

_GROUP = re.compile(r"/job_(\d+)/step_(\w+)")
_TITLE = re.compile(rb"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)\]")  # of a heterogeneous job: [12+1.0]
# What srun and slurmstepd set for a step. SLURM_STEPMGR is a setting of the cluster.
_OF_STEP = re.compile(r"SLURM_STEP_\w+|SLURM_STEPID|SLURM_SRUN_COMM_\w+|SLURM_LAUNCH_NODE_IPADDR|SLURM_PTY_\w+")
# What slurmd sets on a node for the process that it starts there: the shell of salloc has none of it.
_ON_NODE = re.compile(r"SLURMD_NODENAME|SLURM_(NODEID|PROCID|LOCALID|GTIDS|TASK_PID|CPUS_ON_NODE|GPUS_ON_NODE|JOB_GPUS)")
# What was asked for, and what shows that it was: without the second, the first is another job's.
_GPUS_ASKED = re.compile(r"SLURM_GPUS|SLURM_GPUS_PER_(NODE|TASK|SOCKET)")
_GPUS_GIVEN = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_TASKS_ASKED = re.compile(JOB.tasks_asked_per_node)
_OF_PMI = re.compile(r"PMI_\w+")
# What Slurm's programs are set up with, in a job or not: sbatch(1), "INPUT ENVIRONMENT VARIABLES".
_SETTINGS = re.compile(r"SLURM_(CONF|CONF_SERVER|JWT|SACK_\w+|CLUSTERS|EXIT_ERROR|DEBUG_FLAGS|TIME_FORMAT)")


@dataclass(frozen=True)
class Origin:
    """Where Slurm started a process."""

    job: str
    """Id of the job."""
    step: str
    """`0` and so on of a step, `batch` of a batch script, `interactive` of the shell that salloc opened on a node."""
    terminals: Mapping[str, bool]
    """The process and those above it, by their ids: whether each has a terminal."""


def own_environment() -> dict[str, str]:
    """Return the environment of this process without what it only inherited."""
    return own(os.environ, find_origin()) if JOB.job_id in os.environ else dict(os.environ)


def own(environment: Mapping[str, str], origin: Origin | None) -> dict[str, str]:
    """Return `environment` without what a process of this origin (None: unknown, or not Slurm's) can only have inherited."""
    kept = dict(environment)
    job = environment.get(JOB.job_id)
    # The processes of a heterogeneous job have ids of several jobs; that of a login by ssh (`extern`) was set by hand.
    if origin is None or job is None or origin.step == "extern" or JOB.het_size in environment:
        return kept
    if origin.job != job:  # the shell of salloc
        kept = _without(kept, _OF_STEP, _ON_NODE, _GPUS_ASKED, *_tasks_asked(kept))
    elif origin.step == "batch":
        gpus = [] if any(name in kept for name in _GPUS_GIVEN) else [_GPUS_ASKED]
        kept = _without(kept, _OF_STEP, *gpus, *_tasks_asked(kept))
    elif origin.terminals.get(environment.get(JOB.pid, "")) is False:
        kept = {name: value for name, value in kept.items() if not name.startswith("SLURM_PTY_")}
    # Slurm's own PMI names the step, as in PMI_JOBID=12.0, and has ended with it.
    theirs = re.fullmatch(r"(\d+)\.\d+", environment.get("PMI_JOBID", ""))
    return _without(kept, _OF_PMI) if theirs and theirs[1] != job else kept


def for_a_new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be handed to sbatch: inside a job only what Slurm's programs are set up with, of all SLURM_ variables.

    Else its number of tasks, its GPUs, its memory and its place in an array would pass for the new job's.
    """
    if JOB.job_id not in environment:
        return dict(environment)
    return {name: value for name, value in environment.items() if not name.startswith("SLURM") or _SETTINGS.fullmatch(name)}


def find_origin(proc: Path = Path("/proc")) -> Origin | None:
    """Return where Slurm started this process, or None where that cannot be seen. `proc` is the kernel's folder."""
    terminals, named = {}, None
    pid = (proc / "self").resolve().name
    while pid != "0" and named is None:
        try:
            # Behind the name, which may have blanks and brackets: state, parent, group, session, terminal (proc(5)).
            _, parent, _, _, terminal = (proc / pid / "stat").read_text().rpartition(")")[2].split()[:5]
            named = _TITLE.match((proc / pid / "cmdline").read_bytes())
        except OSError:  # hidden, or no Linux
            break
        terminals[pid] = terminal != "0"
        pid = parent
    if named:
        return Origin(named[1].decode(), named[2].decode(), terminals)
    try:
        grouped = _GROUP.findall((proc / "self" / "cgroup").read_text())
    except OSError:
        return None
    if not grouped:
        return None
    job, step = grouped[-1]  # the innermost, where a cluster runs in another's job
    return Origin(job, step, terminals)


def _tasks_asked(environment: Mapping[str, str]) -> list[re.Pattern[str]]:
    """What asks for tasks per node, if Slurm has given others: SLURM_TASKS_PER_NODE, as `2(x3),1`, is set anew for each job."""
    counts = [count for count, _ in Slurm(environment, JOB).counts(JOB.tasks_per_node)]
    return [_TASKS_ASKED] if counts and environment.get(JOB.tasks_asked_per_node) != str(max(counts)) else []


def _without(environment: Mapping[str, str], *patterns: re.Pattern[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not any(pattern.fullmatch(name) for pattern in patterns)}
