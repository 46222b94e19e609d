"""app.train with a disk that is full when the ledger is to be on it, after a number of times: `no_fsync.py TIMES ARGUMENTS`."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from app.train import main

fsync, times = os.fsync, int(sys.argv[1])


def fsync_until_full(handle: int) -> None:
    global times  # noqa: PLW0603 - one process, one counter
    if Path(f"/proc/self/fd/{handle}").readlink().name == "ledger.jsonl":
        times -= 1
        if times < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fsync(handle)


os.fsync = fsync_until_full
main(sys.argv[2:])
