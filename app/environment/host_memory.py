"""Memory of this machine: what its processes may use together, whether the kernel killed one for it, and what malloc keeps.

Standard library only.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
