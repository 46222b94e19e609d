"""Tensors in safetensors files (https://huggingface.co/docs/safetensors, "Format"), a chunk at a time in both directions.

Any safetensors library reads and writes these files; this module saves memory. `save_file` needs all tensors on the CPU
together and the file read again for its hash: here a tensor of any size and device passes through memory once, in chunks of
CHUNK_BYTES. And `safe_open` maps the whole file, privately and writable (0.8.0), which counts as the process's own memory
under a limit, and which Linux refuses for a file larger than the machine's memory.

Only functions that take or return tensors import torch.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import CheckpointError
from app.files import atomic_files
from app.files.atomic_files import Stamp, disk_errors
from app.files.text_files import is_count, parsed
from app.init.region import Region

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""The dtypes that can be read: safetensors' name, torch's name and the bytes of an element."""
_SAVED = {theirs: ours for ours, (theirs, _) in _DTYPES.items() if not ours.startswith("F8")}
"""The dtypes that can be saved: torch's name and safetensors'."""


OF_TORCH = {"format": "pt"}
"""Metadata by which libraries recognise a file as torch's."""


def can_save(dtype: torch.dtype) -> bool:
    """Return True if a tensor of this type can be saved."""
    return str(dtype).removeprefix("torch.") in _SAVED


@dataclass(frozen=True)
class Content:
    """A tensor to be written, as its bytes."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    chunks: Iterable[bytes | bytearray | memoryview]
    """Its elements in order, read when they are written."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read_into: Callable[[torch.Tensor, Region], None]
    """Fills values, 1-D, with the elements of a region of the tensor, converted to their dtype."""


StoredWeights = Mapping[str, StoredTensor]
"""The tensors of a model, by their names on disk."""


def dtype_of(name: str, tensor: torch.Tensor) -> str:
    """Return safetensors' name of a tensor's dtype. Raises CheckpointError for one that cannot be saved."""
    dtype = _SAVED.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{name} is {tensor.dtype}, which cannot be saved; supported: {', '.join(_SAVED)}.")
    return dtype


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype for a name of safetensors."""
    import torch

    found: torch.dtype = getattr(torch, _DTYPES[dtype][0])
    return found


def size_bytes(content: Content) -> int:
    """Return the size of a tensor in a file."""
    return prod(content.shape) * _DTYPES[content.dtype][1]


def contents(tensors: Mapping[str, torch.Tensor], *, on_chunk: Callable[[], object] = lambda: None) -> dict[str, Content]:
    """Return tensors of any shape and device as `write` takes them; `on_chunk` as in `chunks`.

    Raises CheckpointError for a dtype that cannot be saved.
    """
    return {name: Content(dtype_of(name, it), tuple(it.shape), chunks(it, on_chunk)) for name, it in tensors.items()}


def chunks(tensor: torch.Tensor, on_chunk: Callable[[], object] = lambda: None) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of any shape and device in pieces of CHUNK_BYTES, and call `on_chunk` before each."""
    import torch

    flat = tensor.detach().reshape(-1)
    for part in flat.split(atomic_files.CHUNK_BYTES // flat.element_size()):
        on_chunk()
        yield memoryview(part.cpu().contiguous().view(torch.uint8).numpy())


def write(
    path: Path, contents: Mapping[str, Content], metadata: Mapping[str, str] | None = None, *, final: Path | None = None
) -> Stamp:
    """Write tensors, and wait until they are on the disk. Raises CheckpointError, which names `final` if it is given."""
    # Wide elements first, as in safetensors itself: then each tensor's data is aligned to its element.
    ordered = sorted(contents.items(), key=lambda named: -_DTYPES[named[1].dtype][1])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, content in ordered:
        start, end = end, end + size_bytes(content)
        header[name] = {"dtype": content.dtype, "shape": list(content.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return atomic_files.write_chunks(path, chain([head], *(content.chunks for _, content in ordered)), final=final)


class TensorFile:
    """A safetensors file to read. Raises CheckpointError if it cannot be read, or has a tensor of an unknown dtype."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path, "read"):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe reads as empty
            weakref.finalize(self, os.close, self._descriptor)
            size_bytes = os.fstat(self._descriptor).st_size
        header_bytes = int.from_bytes(self._read(0, min(8, size_bytes)), "little")
        if size_bytes < 8 or header_bytes > size_bytes - 8:
            raise self._broken("it has no header")
        self._data_start = 8 + header_bytes
        try:
            header = parsed(self._read(8, header_bytes))
            header.pop("__metadata__", None)
            self.dtypes: dict[str, str] = {name: it["dtype"] for name, it in header.items()}
            self.shapes: dict[str, tuple[int, ...]] = {name: tuple(it["shape"]) for name, it in header.items()}
            self._offsets: dict[str, tuple[int, int]] = {name: tuple(it["data_offsets"]) for name, it in header.items()}
            unknown = set(self.dtypes.values()) - _DTYPES.keys()
            for name, (first, end) in self._offsets.items() if not unknown else ():
                counts = all(map(is_count, (first, end, *self.shapes[name])))
                if not counts or end - first != prod(self.shapes[name]) * self._item_bytes(name):
                    raise ValueError(f"{name} has the shape {self.shapes[name]} and the offsets {[first, end]}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken("its header is invalid") from error
        if unknown:
            raise CheckpointError(f"{path} has tensors of {unknown}, which cannot be read; supported: {', '.join(_DTYPES)}.")
        if max((end for _, end in self._offsets.values()), default=0) != size_bytes - self._data_start:
            raise self._broken(f"it has {size_bytes} bytes, which is not the size in its header")

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytearray]:
        """Yield the bytes of the elements start .. stop - 1 of a flattened tensor, in chunks of whole elements."""
        item_bytes, offset = self._item_bytes(name), self._data_start + self._offsets[name][0]
        assert 0 <= start <= stop <= prod(self.shapes[name]), (name, start, stop)
        step = atomic_files.CHUNK_BYTES // item_bytes
        for position in range(start, stop, step):
            yield self._read(offset + position * item_bytes, min(step, stop - position) * item_bytes)

    def read_into(self, name: str, values: torch.Tensor, wanted: Region | None = None, stored: Region | None = None) -> None:
        """Fill `values`, 1-D, which are the elements `wanted` of a tensor, as far as they are stored under this name.

        The file has the elements `stored` of the tensor. By default both are all of it. Elements are converted to the dtype
        and device of `values`.
        """
        import torch

        dtype, target = torch_dtype(self.dtypes[name]), values.detach()
        assert values.is_contiguous(), name
        stored = stored or Region.flat(0, prod(self.shapes[name]))
        wanted = wanted or stored
        for both in stored.overlaps(wanted):
            for part in both.pieces(atomic_files.CHUNK_BYTES // dtype.itemsize):
                source, place, shape = stored.inside(part), wanted.inside(part), (part.runs, part.run)
                elements = torch.frombuffer(next(self.chunks(name, source.start, source.end)), dtype=dtype)
                into = target.as_strided(shape, (place.stride, 1), target.storage_offset() + place.start)
                into.copy_(elements.as_strided(shape, (source.stride, 1)))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU."""
        import torch

        tensor = torch.empty(self.shapes[name], dtype=torch_dtype(self.dtypes[name]))
        self.read_into(name, tensor.view(-1))
        return tensor

    def _item_bytes(self, name: str) -> int:
        return _DTYPES[self.dtypes[name]][1]

    def _read(self, offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        with disk_errors(self.path, "read"):
            if os.preadv(self._descriptor, [buffer], offset) != count:
                raise self._broken("it ends early")
        return buffer

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged, or not a safetensors file: {why}. It cannot be used.")
