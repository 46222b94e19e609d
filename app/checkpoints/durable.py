"""Files that are on disk when the call returns, hashed while they are written. A disk error becomes one sentence.

Nothing passes through memory in larger chunks than CHUNK_BYTES. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.errors import CheckpointError
from app.files.whole import Hashed, sha256_of
from app.record.run_folder import refusal

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Stamp:
    """What a file was when it was written."""

    size_bytes: int
    sha256: str
    """Hexadecimal. On processors with instructions for it, SHA-256 is the fastest hash of hashlib."""


@contextmanager
def telling(path: Path, done: str) -> Iterator[None]:
    """Turn an error of the system into a CheckpointError: `path` cannot be `done` ("written", "read", "removed")."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(refusal(path, done, error)) from error


def write_bytes(path: Path, content: bytes) -> Stamp:
    """Write a file and wait until the disk has it. Raises CheckpointError."""
    return write_chunks(path, [content])


def write_chunks(path: Path, chunks: Iterable[bytes | bytearray | memoryview]) -> Stamp:
    """Write a file of these parts, taken one by one, and wait until the disk has it. Raises CheckpointError."""
    with telling(path, "written"), path.open("wb") as opened:
        file = Hashed(opened)
        for chunk in chunks:
            file.write(chunk)
        return Stamp(sha256=file.finish(), size_bytes=file.size_bytes)


def check(path: Path, stamp: Stamp) -> None:
    """Raise CheckpointError, naming the file, if it is missing, of another size or of other content than it was written."""
    check_size(path, stamp)
    with telling(path, "read"):
        found = sha256_of(path)
    if found != stamp.sha256:
        raise CheckpointError(f"{path} has changed since it was written (its SHA-256 differs), so it cannot be used.")


def check_size(path: Path, stamp: Stamp) -> None:
    """Raise CheckpointError, naming the file, if it is missing or of another size than it was written."""
    with telling(path, "read"):
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: its checkpoint cannot be used.") from None
    if size_bytes != stamp.size_bytes:
        how = "is truncated" if size_bytes < stamp.size_bytes else "has grown"
        raise CheckpointError(f"{path} {how}: it has {size_bytes} bytes instead of {stamp.size_bytes}. It cannot be used.")
