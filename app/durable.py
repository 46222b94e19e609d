"""Files that are on the disk when the call returns, hashed while they are written; what a disk does is told in a sentence.

Tensors are written in the safetensors format (https://huggingface.co/docs/safetensors, "Format"), which any safetensors
reads. This writes it by itself because `safetensors.torch.save_file` wants all tensors on the CPU at once and the file read
again for its hash: here a tensor goes through memory in chunks of CHUNK_BYTES, whatever its size and device, once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from app.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that can be saved, as safetensors names them."""

_ADVICE = {
    errno.ENOSPC: "Free space there, or keep fewer checkpoints.",
    errno.EDQUOT: "Free space in this quota, or keep fewer checkpoints.",
    errno.EROFS: "Mount it writable, or choose another --run-dir.",
    errno.EACCES: "Give this user the right to, or choose another --run-dir.",
    errno.EPERM: "Give this user the right to, or choose another --run-dir.",
}


@dataclass(frozen=True)
class Stamp:
    """What a file was when it was written."""

    size_bytes: int
    sha256: str
    """Hexadecimal, as `sha256sum` prints it. On processors with instructions for it SHA-256 is the fastest of hashlib's."""


@contextmanager
def telling(path: Path, done: str) -> Iterator[None]:
    """Turn an error of the system into a CheckpointError: `path` cannot be `done` ("written", "read", "removed")."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Look at the file system it is on.")
        raise CheckpointError(f"{path} cannot be {done}: {error.strerror or error}. {advice}") from error


def write_bytes(path: Path, content: bytes) -> Stamp:
    """Write a file and wait until the disk has it. Raises CheckpointError."""
    return _write(path, [content])


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> Stamp:
    """Write tensors of any shape and device as a safetensors file, and wait until the disk has it. Raises CheckpointError."""
    assert len({name for name, _ in tensors}) == len(tensors), f"a tensor is given twice for {path}"
    # Wide elements first, as safetensors itself does it: then each tensor's data is aligned to its element.
    ordered = sorted(tensors, key=lambda named: -named[1].element_size())
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which cannot be saved: {', '.join(map(str, DTYPE_NAMES))} can."
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return _write(path, chain([head], *(_chunks(tensor) for _, tensor in ordered)))


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    for part in flat.split(CHUNK_BYTES // flat.element_size()):
        yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> Stamp:
    size_bytes, digest = 0, hashlib.sha256()
    with telling(path, "written"), path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Stamp(size_bytes, digest.hexdigest())


def check(path: Path, stamp: Stamp) -> None:
    """Raise CheckpointError, naming the file, if it is missing, of another size or of other content than it was written."""
    check_size(path, stamp)
    digest = hashlib.sha256()
    with telling(path, "read"), path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != stamp.sha256:
        raise CheckpointError(f"{path} has changed since it was written (its SHA-256 is another): it cannot be used.")


def check_size(path: Path, stamp: Stamp) -> None:
    """Raise CheckpointError, naming the file, if it is missing or of another size than it was written."""
    with telling(path, "read"):
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: its checkpoint cannot be used.") from None
    if size_bytes != stamp.size_bytes:
        how = "is truncated" if size_bytes < stamp.size_bytes else "has grown"
        raise CheckpointError(
            f"{path} {how}: it has {size_bytes} bytes, and {stamp.size_bytes} were written. It cannot be used."
        )


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # fsync(2): this file system has no fsync for folders
            raise
    finally:
        os.close(descriptor)
