"""How many CPU cores a process may really use: by its affinity, its container's limit and its job's share.

A machine's number of cores says little: a job has some of them, a container a share of their time. `of_this_process` takes the
least that any of these grants. Standard library only.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from app.environment import host_memory
from app.environment.slurm_variables import STEP, Slurm, is_in_step, own_environment


def usable(local_world_size: int) -> int:
    """Return the cores that this process may use, of `local_world_size` that share what the node gives them; at least 1."""
    return share(own_environment(), local_world_size, bound=len(os.sched_getaffinity(0)), quota=quota())


def machine() -> str:
    """Return cores, processor, system and Python, in one line."""
    processor = cpuinfo_field("model name") or platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, {platform.system()} {platform.release()}, Python " + (
        platform.python_version()
    )


def cpuinfo_field(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what Linux tells of the first processor under a name, such as `model name`; empty where it does not."""
    found = re.search(rf"^{name}\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else ""


def lacks_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is known to be a processor without instructions for bf16 numbers; only x86 tells."""
    flags = cpuinfo_field("flags", cpuinfo).split()
    return bool(flags) and not {"avx512_bf16", "amx_bf16"} & set(flags)


def share(environment: Mapping[str, str], local_world_size: int, *, bound: int, quota: float | None) -> int:
    """Return the cores of one of `local_world_size` processes of a node, at least 1.

    Where Slurm started the processes one by one, each is bound to cores of its own (`bound`) and told their number by
    `environment`; otherwise they share what the process was bound to that started them. `quota` is how many cores' time all
    processes of the node may use together; None: no limit.
    """
    slurm, in_step = Slurm(environment, STEP), is_in_step(environment)
    tasks = local_world_size if in_step and slurm.first(STEP.tasks_per_node) not in (None, 1) else 1
    on_node = slurm.first(STEP.cpus_on_node)
    given = [bound]
    if in_step and STEP.cpus_per_task in environment:
        given += [slurm.first(STEP.cpus_per_task) or bound]
    elif on_node is not None:
        given += [on_node // tasks]
    cores = min(given) * tasks // local_world_size
    if quota is not None:
        cores = min(cores, int(quota / local_world_size))
    return max(1, cores)


def quota(memberships: Path = host_memory.MEMBERSHIPS, root: Path = host_memory.ROOT) -> float | None:
    """Return the cores whose time this process's cgroups may use, the least of all that contain it; None: no limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`).
    """
    found = (_limit(folder) for folder in host_memory.cgroup_folders("cpu", memberships, root))
    return min((limit for limit in found if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            numbers = " ".join((folder / name).read_text() for name in names).split()
        except OSError:  # not of this version, or not here
            continue
        if numbers[0] not in ("max", "-1"):
            return int(numbers[0]) / int(numbers[1])
    return None
