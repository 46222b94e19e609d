"""Tensors in safetensors files (https://huggingface.co/docs/safetensors, "Format"), a chunk at a time in both directions.

The files are what any safetensors reads and writes; this does it by itself for the sake of memory. `save_file` wants all
tensors on the CPU at once and the file read again for its hash: here a tensor of any size and device passes through memory
once, in chunks of whole.CHUNK_BYTES. And `safe_open` maps the whole file, privately and writable (0.8.0), which counts as
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

from app.errors import CheckpointError
from app.files import atomic_files
from app.files.atomic_files import Stamp, disk_errors
from app.files.lines import is_count, parsed
from app.init.region import Region

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
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The dtypes that can be read: safetensors' name and torch's."""
_NAMES = {name: ours for ours, name in _TORCH_NAMES.items() if not ours.startswith("F8")}
"""Those that can be saved."""
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1} | {
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

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


def write(
    path: Path, contents: Mapping[str, Content], metadata: Mapping[str, str] | None = None, *, final: Path | None = None
) -> Stamp:
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
    return atomic_files.write_chunks(path, chain([head], *(content.chunks for _, content in ordered)), final=final)


def is_known(dtype: Any) -> bool:
    """Return whether a name is that of a type that can be read."""
    return isinstance(dtype, str) and dtype in _ITEM_BYTES


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
    for part in flat.split(atomic_files.CHUNK_BYTES // flat.element_size()):
        on_chunk()
        yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


class TensorFile:
    """A safetensors file that is read. Raises CheckpointError wherever it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path, "read"):
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            size_bytes = os.fstat(self._descriptor).st_size
        header_bytes = int.from_bytes(self._read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MOST_HEADER_BYTES):
            raise self._broken("it has no header")
        self._data_start = 8 + header_bytes
        try:
            header = parsed(self._read(8, header_bytes))
            header.pop("__metadata__", None)
            self.dtypes: dict[str, str] = {name: it["dtype"] for name, it in header.items()}
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(it["shape"]) for name, it in header.items()}
            self._offsets: dict[str, tuple[int, int]] = {name: tuple(it["data_offsets"]) for name, it in header.items()}
            for name, (first, end) in self._offsets.items():
                if (
                    not all(map(is_count, (first, end, *self.shapes[name])))
                    or first > end
                    or not isinstance(self.dtypes[name], str)
                ):
                    raise ValueError(f"{name} has the shape {self.shapes[name]} and the offsets {[first, end]}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken("its header is invalid") from error
        if max((end for _, end in self._offsets.values()), default=0) != size_bytes - self._data_start:
            raise self._broken(f"it has {size_bytes} bytes, and its header says another size")

    def check(self, name: str, dtype: str, count: int) -> None:
        """Raise CheckpointError if the file has no tensor of a name with this type and so many elements."""
        if self.dtypes.get(name) != dtype or prod(self.shapes[name]) != count:
            raise self._broken(f"it has no {name} of {count} elements of {dtype}")
        next(self.chunks(name, 0, 0), None)

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytearray]:
        """Yield the bytes of the elements start .. stop - 1 of a flattened tensor, in chunks of whole elements."""
        item_bytes, (first, end) = self._item_bytes(name), self._offsets[name]
        if prod(self.shapes[name]) * item_bytes != end - first:
            raise self._broken(f"the offsets of {name} do not match its size")
        offset = self._data_start + first
        assert 0 <= start <= stop <= prod(self.shapes[name]), (name, start, stop)
        step = atomic_files.CHUNK_BYTES // item_bytes
        for position in range(start, stop, step):
            yield self._read(offset + position * item_bytes, min(step, stop - position) * item_bytes)

    def read_into(self, name: str, values: torch.Tensor, wanted: Region | None = None, there: Region | None = None) -> None:
        """Fill what is there of the `wanted` elements of a tensor in `values`, 1-D, in their dtype and on their device.

        The tensor `name` has the elements `there` of it, one after the other; all, and in `values` too, if nothing is said.
        """
        import torch

        self._item_bytes(name)
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
        size = self._item_bytes(name)
        for part, chunk in self._parts(name, wanted, there):
            begin, between, gap = wanted.inside(part).start * size, wanted.distance(part) * size, there.distance(part) * size
            for number in range(part.runs):
                at, of = begin + number * between, number * gap
                target[at : at + part.run * size] = memoryview(chunk)[of : of + part.run * size]

    def _parts(self, name: str, wanted: Region, there: Region) -> Iterator[tuple[Region, bytearray]]:
        """Yield what is there and wanted, with the bytes from the first to the last of it, few of which are others."""
        size = self._item_bytes(name)
        most = atomic_files.CHUNK_BYTES // size
        for both in there.overlaps(wanted):
            apart = there.distance(both) - both.run > _READ_OVER_BYTES // size
            for part in both.pieces(both.run if apart and both.run <= most else most):
                place = there.inside(part)
                yield part, next(self.chunks(name, place.start, place.end))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU."""
        import torch

        self._item_bytes(name)
        tensor = torch.empty(self.shapes[name], dtype=getattr(torch, _TORCH_NAMES[self.dtypes[name]]))
        self.read_into(name, tensor.view(-1))
        return tensor

    def _item_bytes(self, name: str) -> int:
        if (dtype := self.dtypes[name]) not in _ITEM_BYTES:
            raise CheckpointError(
                f"{name} in {self.path} is {dtype}, which cannot be read; supported: {', '.join(_ITEM_BYTES)}."
            )
        return _ITEM_BYTES[dtype]

    def _read(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        with disk_errors(self.path, "read"):
            if os.preadv(self._descriptor, [buffer], offset) != count:
                raise self._broken("it ends early")
        return buffer

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged, or not a safetensors file: {why}. It cannot be used.")
