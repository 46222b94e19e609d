"""Writes whole files: they get their final name only when they are complete and on the disk. Hashes files.

Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from app.errors import CheckpointError, SamerunError

CHUNK_BYTES = 16 * 2**20
_ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free space there, or keep fewer checkpoints.") | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "Make it writable for this user, or choose another --run-dir."
)


@dataclass(frozen=True)
class Stamp:
    """Size and hash of a file when it was written."""

    size_bytes: int
    sha256: str
    """Hexadecimal. On processors with instructions for it, SHA-256 is the fastest hash of hashlib."""


@contextmanager
def disk_errors(path: Path, done: str, kind: type[SamerunError] = CheckpointError) -> Iterator[None]:
    """Raise an OSError as our own: that `path` cannot be `done` ("written", "read", "removed"), why, and what helps."""
    try:
        yield
    except OSError as error:
        raise kind(refusal(path, done, error)) from error


def refusal(path: Path, done: str, error: OSError) -> str:
    """Return the sentence of `disk_errors`."""
    advice = _ADVICE.get(error.errno or 0, "Look at the file system it is on.")
    return f"{path} cannot be {done}: {error.strerror or error}. {advice}"


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
        sync(path.parent)
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


def write_chunks(path: Path, chunks: Iterable[bytes | bytearray | memoryview], *, final: Path | None = None) -> Stamp:
    """Write a file in chunks, wait until the disk has it, and return its hash.

    Raises CheckpointError, which names `final` if the file will be renamed to that.
    """
    with disk_errors(final or path, "written"), path.open("wb") as opened:
        file = Hashed(opened)
        for chunk in chunks:
            file.write(chunk)
        return Stamp(sha256=file.finish(), size_bytes=file.size_bytes)


def check_stamp(path: Path, stamp: Stamp, *, size_alone: bool = False) -> None:
    """Raise CheckpointError if a file is missing, or its size or, unless `size_alone`, its content is not as written."""
    with disk_errors(path, "read"):
        size_bytes = path.stat().st_size
        if size_bytes != stamp.size_bytes:
            raise CheckpointError(f"{path} has {size_bytes} bytes instead of {stamp.size_bytes}: it cannot be used.")
        if not size_alone and sha256_of(path) != stamp.sha256:
            raise CheckpointError(f"{path} has changed since it was written (its SHA-256 differs), so it cannot be used.")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as `sha256sum` prints it. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_remains(folder: Path) -> None:
    """Remove what killed processes had made of `folder`. No process may be making it meanwhile."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def new_folder(path: Path) -> Path:
    """Make a folder of this name, or of this name and a number, that did not exist. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, candidate = 1, path
    while True:
        with suppress(FileExistsError):
            candidate.mkdir()
            return candidate
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
