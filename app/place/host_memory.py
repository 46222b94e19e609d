"""How much memory the processes of this machine may use together, and whether the kernel killed one for lack of it.

Standard library only.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.place import groups

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


def find(
    memberships: Path = groups.MEMBERSHIPS, root: Path = groups.ROOT, meminfo: Path = Path("/proc/meminfo")
) -> HostMemory | None:
    """Return the least that the machine and the control groups of this process grant; None: nothing tells."""
    try:
        told = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE)}
    except OSError:  # no Linux
        return None
    swap = told.get("SwapTotal", 0)
    found = [HostMemory(told["MemTotal"] + swap, "all that this machine has")] if "MemTotal" in told else []
    for folder in groups.folders("memory", memberships, root):
        for name in _LIMITS:
            with suppress(OSError, ValueError):
                limit = int((folder / name).read_text())
                if limit < _NO_LIMIT:
                    found.append(HostMemory(limit + swap, f"the limit of this job's control group, {name}"))
    return min(found, key=lambda it: it.limit, default=None)


def kills(memberships: Path = groups.MEMBERSHIPS, root: Path = groups.ROOT) -> int:
    """Return how many processes of this process's own control groups the kernel has ended for lack of memory."""
    count = 0
    for folder in groups.folders("memory", memberships, root):
        for name in _EVENTS:
            with suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE)
                count = max(count, int(found[1]) if found else 0)
    return count
