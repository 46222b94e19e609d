"""A control group with a limit of memory, for processes that a test starts: needs root."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_VERSION_1 = ROOT / "memory"
_LEAVING_S = 10.0


def why_not() -> str | None:
    """Return why no group can be made here; None: one can."""
    if os.geteuid() != 0:
        return "creating control groups needs root"
    if _VERSION_1.is_dir():
        return None if os.access(_VERSION_1, os.W_OK) else f"{_VERSION_1} is read-only"
    controls = ROOT / "cgroup.subtree_control"
    if not controls.exists() or not os.access(controls, os.W_OK):
        return f"the control groups in {ROOT} are not writable"
    return None if "memory" in controls.read_text().split() else f"{controls} does not list the memory controller"


@dataclass(frozen=True)
class Group:
    """The processes in it together have so much memory, and are ended when they want more."""

    folder: Path

    def inside(self, command: list[str]) -> list[str]:
        """Return the command line that runs the command in the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def peak_bytes(self) -> int:
        """The most that they have used, with what of files the kernel kept for them."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        return next(int((self.folder / name).read_text()) for name in names if (self.folder / name).exists())


@contextmanager
def limited(limit_bytes: int) -> Iterator[Group]:
    """Make a group inside the block; what still runs in it at the end is ended, and the group removed."""
    parent, name = (_VERSION_1, "memory.limit_in_bytes") if _VERSION_1.is_dir() else (ROOT, "memory.max")
    folder = parent / f"samerun-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / name).write_text(str(limit_bytes))
        yield Group(folder)
    finally:
        _empty(folder)
        folder.rmdir()


def _empty(folder: Path) -> None:
    deadline = time.monotonic() + _LEAVING_S
    while processes := (folder / "cgroup.procs").read_text().split():
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} still holds {', '.join(processes)}")
        time.sleep(0.1)
