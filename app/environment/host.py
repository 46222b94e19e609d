"""This machine: the CPU cores and the memory that a process may really use.

Standard library only.

A machine's number of cores says little: a job has some of them, a container a share of their time. `of_this_process` takes the
least that any of these grants. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.environment.slurm_variables import STEP, Slurm, is_in_step, own_environment

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cgroup_folders(controller: str, memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of the groups that contain this process, the innermost first, of version 2 and 1.

    In a container the path that the kernel tells may not be there: then its parents are, up to the root, which is the
    container's own.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == top:
                break


_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of version 2 of control groups, and of version 1."""
_EVENTS = ("memory.events", "memory.oom_control")
_NO_LIMIT = 2**60
"""Version 1 writes its greatest number where there is no limit."""


@dataclass(frozen=True)
class HostMemory:
    """The most that all processes of this job on this machine can have, whatever else is there now."""

    limit: int
    """Bytes, with all that may be swapped out."""
    origin: str
    """Where that comes from."""


def find(memberships: Path = MEMBERSHIPS, root: Path = ROOT, meminfo: Path = Path("/proc/meminfo")) -> HostMemory | None:
    """Return the least that the machine and the control groups of this process grant; None: nothing tells."""
    try:
        told = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE)}
    except OSError:  # no Linux
        return None
    swap = told.get("SwapTotal", 0)
    found = [HostMemory(told["MemTotal"] + swap, "all that this machine has")] if "MemTotal" in told else []
    for folder in cgroup_folders("memory", memberships, root):
        for name in _LIMITS:
            with suppress(OSError, ValueError):
                limit = int((folder / name).read_text())
                if limit < _NO_LIMIT:
                    found.append(HostMemory(limit + swap, f"the limit of this job's control group, {name}"))
    return min(found, key=lambda it: it.limit, default=None)


def kills(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> int:
    """Return how many processes of this process's own control groups the kernel has ended for lack of memory."""
    count = 0
    for folder in cgroup_folders("memory", memberships, root):
        for name in _EVENTS:
            with suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE)
                count = max(count, int(found[1]) if found else 0)
    return count


# Of mallopt(3) and malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6


def keep_freed(*, most_bytes: int = 32 << 20) -> None:
    """Have malloc keep what is freed for the next allocation, instead of giving it back to the system, unless it is larger.

    Tensors of some MB are mapped anew otherwise, and their pages cleared, in each operation of each step: a tenth to a quarter
    of a convolutional network's step (docs/performance.md). By default it is the largest that mallopt(3) takes.
    """
    if mallopt := _mallopt():
        mallopt(_M_MMAP_THRESHOLD, most_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Give what is free now back to the system, also between what is in use (malloc_trim(3))."""
    if _mallopt():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def filled_with(byte: int) -> Iterator[None]:
    """Have malloc fill what it gives with this byte, from 0 to 254, of more than the 1 KiB that threads keep for themselves."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, byte ^ 0xFF)  # new memory gets the complement of the number; 0 turns it off
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


def _mallopt() -> Callable[[int, int], Any] | None:
    return ctypes.CDLL(None).mallopt if platform.libc_ver()[0] == "glibc" else None


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


def quota(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> float | None:
    """Return the cores whose time this process's cgroups may use, the least of all that contain it; None: no limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`).
    """
    found = (_limit(folder) for folder in cgroup_folders("cpu", memberships, root))
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
