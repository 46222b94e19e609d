"""Tensors in safetensors files (https://huggingface.co/docs/safetensors, "Format"), a chunk at a time in both directions.

The files are what any safetensors reads and writes; this does it by itself for the sake of memory. `save_file` wants all
tensors on the CPU at once and the file read again for its hash: here a tensor of any size and device passes through memory
once, in chunks of durable.CHUNK_BYTES. And `safe_open` maps the whole file, privately and writable (0.8.0), which counts as
the process's own memory where that is limited, and which Linux refuses for a file larger than the machine's memory.

Needs no torch, until tensors are given or asked for.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.checkpoints import durable
from app.checkpoints.durable import Stamp, telling
from app.errors import CheckpointError
from app.initial.region import Region

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes that can be saved: safetensors' name and torch's."""
_NAMES = {name: ours for ours, name in _TORCH_NAMES.items()}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

OF_TORCH = {"format": "pt"}
"""Metadata by which libraries recognise a file as torch's."""

_READ_OVER_BYTES = 2**16
"""Gaps up to this size are read along: a second read would cost more."""
_MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""


@dataclass(frozen=True)
class Content:
    """A tensor to be written, as its bytes."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    chunks: Iterable[bytes | bytearray | memoryview]
    """Its elements in order; taken when it is their turn."""


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    """Return the dtype of a tensor as safetensors names it. Raises CheckpointError for one that cannot be saved."""
    dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{name} is {tensor.dtype}, which cannot be saved; supported: {', '.join(_NAMES)}.")
    return dtype


def dtype_in_torch(dtype: str) -> torch.dtype | str:
    """Return torch's type of a name of safetensors; the name itself of one that cannot be read."""
    import torch

    found: torch.dtype | str = getattr(torch, _TORCH_NAMES[dtype]) if dtype in _TORCH_NAMES else dtype
    return found


def write_tensors(
    path: Path,
    tensors: Sequence[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
    *,
    on_chunk: Callable[[], object] = lambda: None,
) -> Stamp:
    """Write tensors of any shape and device, and wait until the disk has them. Raises CheckpointError.

    `on_chunk` is called for each piece of CHUNK_BYTES: a sign that the writing gets on.
    """
    assert len({name for name, _ in tensors}) == len(tensors), f"a tensor is given twice for {path}"
    return write(path, contents(dict(tensors), on_chunk=on_chunk), metadata)


def contents(tensors: Mapping[str, torch.Tensor], *, on_chunk: Callable[[], object] = lambda: None) -> dict[str, Content]:
    """Return tensors of any shape and device as `write` takes them. Raises CheckpointError for one that cannot be saved."""
    return {name: Content(dtype_of(name, it), tuple(it.shape), chunks(it, on_chunk)) for name, it in tensors.items()}


def write(path: Path, contents: Mapping[str, Content], metadata: Mapping[str, str] | None = None) -> Stamp:
    """Write tensors that are given as their bytes, and wait until the disk has them. Raises CheckpointError."""
    # Wide elements first, as safetensors itself does it: then each tensor's data is aligned to its element.
    ordered = sorted(contents.items(), key=lambda named: -_ITEM_BYTES[named[1].dtype])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, content in ordered:
        start, end = end, end + size_bytes(content)
        header[name] = {"dtype": content.dtype, "shape": list(content.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return durable.write_chunks(path, chain([head], *(content.chunks for _, content in ordered)))


def item_bytes(dtype: str) -> int:
    """Return how many bytes an element has."""
    return _ITEM_BYTES[dtype]


def size_bytes(content: Content) -> int:
    """Return how many bytes a tensor has in a file."""
    return prod(content.shape) * _ITEM_BYTES[content.dtype]


def chunks(tensor: torch.Tensor, on_chunk: Callable[[], object] = lambda: None) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of any shape and device, in pieces of CHUNK_BYTES, for each of which `on_chunk` is called."""
    import torch

    flat = tensor.detach().reshape(-1)
    for part in flat.split(durable.CHUNK_BYTES // flat.element_size()):
        on_chunk()
        yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


class TensorFile:
    """A safetensors file that is read. Raises CheckpointError wherever it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with telling(path, "read"):
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            size_bytes = os.fstat(self._descriptor).st_size
        header_bytes = int.from_bytes(self._read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MOST_HEADER_BYTES):
            raise self._broken("it has no header")
        self._data_start = 8 + header_bytes
        try:
            header = json.loads(self._read(8, header_bytes))
            header.pop("__metadata__", None)
            self.dtypes: dict[str, str] = {name: it["dtype"] for name, it in header.items()}
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(it["shape"]) for name, it in header.items()}
            self._offsets: dict[str, tuple[int, int]] = {name: tuple(it["data_offsets"]) for name, it in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken("its header is invalid") from error
        if max((end for _, end in self._offsets.values()), default=0) != size_bytes - self._data_start:
            raise self._broken(f"it has {size_bytes} bytes, and its header says another size")

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytearray]:
        """Yield the bytes of the elements start .. stop - 1 of a flattened tensor, in chunks of whole elements."""
        dtype = self.dtypes[name]
        if dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{name} in {self.path} is {dtype}, which cannot be read; supported: {', '.join(_ITEM_BYTES)}."
            )
        item_bytes, (first, end) = _ITEM_BYTES[dtype], self._offsets[name]
        if prod(self.shapes[name]) * item_bytes != end - first:
            raise self._broken(f"the offsets of {name} do not match its size")
        offset = self._data_start + first
        assert 0 <= start <= stop <= prod(self.shapes[name]), (name, start, stop)
        step = durable.CHUNK_BYTES // item_bytes
        for position in range(start, stop, step):
            yield self._read(offset + position * item_bytes, min(step, stop - position) * item_bytes)

    def read_into(self, name: str, values: torch.Tensor, wanted: Region | None = None, there: Region | None = None) -> None:
        """Fill what is there of the `wanted` elements of a tensor in `values`, 1-D, in their dtype and on their device.

        The tensor `name` has the elements `there` of it, one after the other; all, and in `values` too, if nothing is said.
        """
        import torch

        target, dtype = values.detach(), getattr(torch, _TORCH_NAMES[self.dtypes[name]])
        assert target.is_contiguous(), name
        there = there or Region.flat(0, prod(self.shapes[name]))
        wanted = wanted or there
        for part, chunk in self._parts(name, wanted, there):
            elements = torch.frombuffer(chunk, dtype=dtype)
            shape, gap = (part.runs, part.run), there.distance(part)
            into = target.as_strided(shape, (wanted.distance(part), 1), target.storage_offset() + wanted.inside(part).start)
            into.copy_(elements.as_strided(shape, (gap, 1)))

    def bytes_into(self, name: str, target: bytearray, wanted: Region, there: Region) -> None:
        """Do so with the bytes of the elements."""
        size = _ITEM_BYTES[self.dtypes[name]]
        for part, chunk in self._parts(name, wanted, there):
            begin, between, gap = wanted.inside(part).start * size, wanted.distance(part) * size, there.distance(part) * size
            for number in range(part.runs):
                at, of = begin + number * between, number * gap
                target[at : at + part.run * size] = memoryview(chunk)[of : of + part.run * size]

    def _parts(self, name: str, wanted: Region, there: Region) -> Iterator[tuple[Region, bytearray]]:
        """Yield what is there and wanted, with the bytes from the first to the last of it, few of which are others."""
        most = durable.CHUNK_BYTES // _ITEM_BYTES[self.dtypes[name]]
        for both in there.overlaps(wanted):
            apart = there.distance(both) - both.run > _READ_OVER_BYTES // _ITEM_BYTES[self.dtypes[name]]
            for part in both.pieces(both.run if apart and both.run <= most else most):
                place = there.inside(part)
                yield part, next(self.chunks(name, place.start, place.end))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU."""
        import torch

        tensor = torch.empty(self.shapes[name], dtype=getattr(torch, _TORCH_NAMES[self.dtypes[name]]))
        self.read_into(name, tensor.view(-1))
        return tensor

    def _read(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        with telling(self.path, "read"):
            if os.preadv(self._descriptor, [buffer], offset) != count:
                raise self._broken("it ends early")
        return buffer

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged, or not a safetensors file: {why}. It cannot be used.")
