"""This machine: the CPU cores and the memory that a process may really use, and its processes and their terminals.

A machine's number of cores says little: a job has some of them, a container a share of their time. `usable` takes the least
that any of these grants. psutil is imported where it is needed: the launcher, which starts immediately, reads this module.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.environment.slurm_variables import STEP, Slurm, is_in_step, own_environment
from app.errors import LackOfMemoryError, UsageError

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def _cgroup_folders(controller: str, memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of the groups that contain this process, the innermost first, of version 2 and 1.

    In a container the path that the kernel gives may not exist: then its parents do, up to the root, which is the
    container's own.
    """
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controllers
            group = top / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def kills() -> int:
    """Return how many processes of this process's own control groups the kernel has killed because memory ran out."""
    files = (folder / name for folder in _cgroup_folders("memory") for name in ("memory.events", "memory.oom_control"))
    texts = (file.read_text() for file in files if file.exists())
    return max((int(count) for text in texts for count in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)), default=0)


# Of mallopt(3) and malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6


def keep_freed(*, most_bytes: int = 32 << 20) -> None:
    """Have malloc keep what is freed for the next allocation, instead of giving it back to the system, unless it is larger.

    Tensors of some MB are mapped anew otherwise, and their pages cleared, in each operation of each step: a tenth to a quarter
    of a convolutional network's step (benchmarks/RESULTS.md). By default it is the largest that mallopt(3) takes.
    """
    _malloc("mallopt", _M_MMAP_THRESHOLD, most_bytes)
    _malloc("mallopt", _M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Give what is free now back to the system, also between what is in use (malloc_trim(3))."""
    _malloc("malloc_trim", 0)


@contextmanager
def filled_with(byte: int) -> Iterator[None]:
    """Have malloc fill what it gives with this byte, from 0 to 254, of more than the 1 KiB that threads keep for themselves."""
    _malloc("mallopt", _M_PERTURB, byte ^ 0xFF)  # new memory gets the complement of the number; 0 turns it off
    try:
        yield
    finally:
        _malloc("mallopt", _M_PERTURB, 0)


def _malloc(function: str, *arguments: int) -> None:
    """Call a function of glibc's malloc; other C libraries have none of them."""
    if platform.libc_ver()[0] == "glibc":
        getattr(ctypes.CDLL(None), function)(*arguments)


def usable(local_world_size: int) -> int:
    """Return the cores that this process may use, of `local_world_size` that share what the node gives them; at least 1."""
    return share(own_environment(), local_world_size, bound=len(os.sched_getaffinity(0)), quota=quota())


def machine() -> str:
    """Return cores, processor, system and Python, in one line."""
    processor = cpuinfo_field("model name") or platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, {platform.system()} {platform.release()}, Python " + (
        platform.python_version()
    )


def cpuinfo_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, such as `model name`; empty if there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else ""


def share(environment: Mapping[str, str], local_world_size: int, *, bound: int, quota: float | None) -> int:
    """Return the cores of one of `local_world_size` processes of a node, at least 1.

    Where Slurm started the processes one by one, each is bound to cores of its own (`bound`); otherwise they share those of
    the process that started them. Slurm's variable gives the CPUs of the job on the node, wherever the process can run. `quota`
    is how many cores' time all processes of the node may use together; None: no limit.
    """
    slurm = Slurm(environment, STEP)
    is_task = is_in_step(environment) and slurm.counts(STEP.tasks_per_node)[:1] not in ([], [1])
    cores = bound if is_task else bound // local_world_size
    limits = [count // local_world_size for count in slurm.counts(STEP.cpus_on_node)[:1]]
    limits += [] if quota is None else [int(quota / local_world_size)]
    return max(1, min([cores, *limits]))


def quota(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> float | None:
    """Return the cores whose time this process's cgroups may use, the least of all that contain it; None: no limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`).
    """
    limits = []
    for folder in _cgroup_folders("cpu", memberships, root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError):  # not of this version, or not here
                used, period = " ".join((folder / name).read_text() for name in names).split()
                limits += [] if used in ("max", "-1") else [int(used) / int(period)]
    return min(limits, default=None)


def kill_all_with(variable: str, value: str) -> int:
    """Kill every other process with this variable in its environment; return how many there were.

    Until none is left: one may have started another meanwhile.
    """
    import psutil

    killed: set[int] = set()
    while True:
        before = len(killed)
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has just ended, or is another user's
                if process.pid not in {os.getpid(), *killed} and process.environ().get(variable) == value:
                    killed.add(process.pid)
                    process.kill()
        if len(killed) == before:
            return before


@contextmanager
def imports_explained() -> Iterator[None]:
    """Raise UsageError where a user's file is imported in place of a library, LackOfMemoryError where one does not fit."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if "failed to map segment" in str(error):  # so reports the dynamic linker that memory is lacking
            raise LackOfMemoryError(f"{error}: request more memory, or run `ulimit -v unlimited` before") from error
        for name in ("yaml", "accelerate", "torch", "numpy", "datasets"):
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and Path(file).stem == name:  # a library is a package
                remedy = "rename it, or remove its folder from PYTHONPATH"
                raise UsageError(f"{file} is imported in place of the library {name} ({error}): {remedy}") from error
        raise


def terminals() -> list[int]:
    """Return which of stdin, stdout and stderr are terminals. Call it early: a lost terminal is none any more."""
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


class StdoutError(OSError):
    """Stdout cannot be written: its reader has gone, or its disk is full."""


class _Stdout(io.FileIO):
    """Stdout whose errors are distinct from other files' errors, or end nothing."""

    is_needed = True

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            redirect_to_null([1])  # or the interpreter would meet the error again when it ends
            if self.is_needed:
                raise StdoutError(error.errno, error.strerror) from error
            with suppress(OSError):  # the terminal of both is gone
                os.write(2, f"samerun: stdout cannot be written ({error.strerror}); the run continues\n".encode())
            return len(data)


def guard_stdout(*, is_needed: bool) -> None:
    """Make stdout raise StdoutError where it cannot be written; or if it is not needed, discard it from then on.

    Characters that its encoding lacks are escaped.
    """
    if sys.stdout is sys.__stdout__:  # else it is of a test, or guarded already
        if sys.stdout is None:  # closed by the shell: `>&-`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raw, encoding = _Stdout(1, "w", closefd=False), getattr(sys.stdout, "encoding", None)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True)
    _Stdout.is_needed = is_needed


def redirect_to_null(descriptors: Collection[int]) -> None:
    """Discard what is written there, and let nothing be read: an error for it would end what still has to save."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
