"""Taking turns: what is made once for all processes of a node is made by one of them, while the others wait.

Where nodes share a disk they take turns as well, if its file system has locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.files.own_folder import own

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks, such as Lustre mounted without `flock`."""


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
    """Return this user's folder for what can be made again: in $SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun.

    Raises OSError if it cannot be made, or somebody else has made it.
    """
    said = os.environ.get("SAMERUN_CACHE")
    place = Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "samerun")
    return own(place.expanduser() / kind)
