"""The control groups (cgroups) of this process, which limit its memory and CPU. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def folders(controller: str, memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[Path]:
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
