"""The memory of processes, as Linux counts it (proc(5), /proc/pid/status)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path


def status_bytes(name: str, process: int | str = "self") -> int:
    """Return a size of a process in bytes, such as its VmRSS; 0 if it has none, as when it has ended."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def peak_anonymous_bytes(work: Callable[[], None]) -> int:
    """Return by how much the memory of a process that does `work` grew at most, without what is a file's (RssAnon of proc(5)).

    The process is a fork of this one, which watches it from outside. Raises RuntimeError if the work fails.
    """
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        failed = 1
        try:
            work()
            failed = 0
        finally:
            os._exit(failed)
    before = peak = status_bytes("RssAnon", child)
    os.write(go, b"x")
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        peak = max(peak, status_bytes("RssAnon", child))
        time.sleep(0.001)
    os.close(wait)
    os.close(go)
    if ended[1] != 0:
        raise RuntimeError(f"the measured process ended with status {ended[1]}")
    return peak - before
