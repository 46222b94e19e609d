"""Files and folders that appear under their final name only when they are complete, and are on the disk; their hashes.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from app.files import regular

_CHUNK_BYTES = 16 * 2**20


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder` to fill, and rename it when the block is done; remove it if the block fails.

    Raises OSError: FileExistsError if there is a `folder` when the block is done, which stays as it is.
    """
    temporary = _beside(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def file_made_whole(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write a file at, which is on the disk before it gets the name. Raises OSError."""
    temporary = _beside(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name.removeprefix('.')}.{uuid.uuid4().hex[:8]}.tmp")


def sync(path: Path) -> None:
    """Wait until the disk has what is in a file, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): this file system has no fsync for folders
            raise
    finally:
        os.close(handle)


class Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self.size_bytes = file, hashlib.sha256(), 0

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Add to it."""
        self._file.write(content)
        self._sha256.update(content)
        self.size_bytes += memoryview(content).nbytes

    def finish(self) -> str:
        """Close the file when the disk has it; return its SHA-256, as `sha256sum` prints it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._sha256.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, as `sha256sum` prints it. Raises OSError."""
    digest = hashlib.sha256()
    with regular.opened(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remove_remains(folder: Path) -> None:
    """Remove what killed processes had made of `folder`. Nobody may be making it meanwhile."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
