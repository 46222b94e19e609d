"""Taking turns: one process of a node makes something for all of them, while the others wait.

Where nodes share a disk they take turns as well, if its file system has locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.files import own_folder

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the file `lock`, and hold it; its folder is made. Raises OSError.

    Where there are no locks at all, nobody waits: what is made under them is renamed, so that at worst it is made twice.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def cache_folder(kind: str) -> Path:
    """Return `own_folder.cache_folder`, by the environment of this process."""
    return own_folder.cache_folder(kind, os.environ)
