"""Opens regular files only: reading a pipe or a device could wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    kind: f"it is {name}, not a file"
    for kind, name in ((stat.S_IFIFO, "a pipe"), (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"))
}


def opened(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, for a pipe, a socket or a device as well; its text says what that is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to is opened at once
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        number, text = (errno.EISDIR, os.strerror(errno.EISDIR)) if kind == stat.S_IFDIR else (errno.EINVAL, _KINDS[kind])
        raise OSError(number, text, str(path))
    return os.fdopen(descriptor, "rb")


def content(path: Path) -> bytes:
    """Return what is in a file. Raises OSError as `opened`."""
    with opened(path) as file:
        return file.read()
