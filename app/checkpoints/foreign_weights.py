"""Weights in the formats of other programs: files of torch.save, as Lightning's .ckpt, folders of DCP and of DeepSpeed's ZeRO.

Nothing that a file names is called or imported. A pickle is read with placeholders for all classes and functions, which are
then compared with the few names that describe a tensor. Files are mapped into memory: a process reads only the elements that it
needs. DCP's own reader calls `pickle.load`, and `torch.load(weights_only=True)` refuses a file for one unknown class.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from app.checkpoints.step_folders import TensorEntry
from app.checkpoints.tensor_file import Content, StoredTensor, torch_dtype
from app.errors import CheckpointError
from app.files.atomic_files import disk_errors
from app.files.text_files import is_count
from app.init.region import Region

NESTED = ("state_dict", "model_state_dict", "model", "module", "app")
"""Keys under which programs save the weights, next to other state."""
_DTYPES = {str(it): it for it in vars(torch).values() if isinstance(it, torch.dtype)}
_WORDS = "Double=float64 Float=float32 Half=float16 BFloat16=bfloat16 Long=int64 Int=int32 Short=int16 Char=int8 Byte=uint8"
_STORAGES = {f"torch.{word}Storage": getattr(torch, dtype) for word, dtype in (it.split("=") for it in _WORDS.split())}
_STORAGES["torch.BoolStorage"] = torch.bool
"""The dtypes that a storage's class states; for others the tensor states it."""
_ADVICE = "save model.state_dict() with torch.save, on the machine that made it"
_OLD_FORMAT = 0x1950A86A20F9469CFC6C
"""The first value in a file of torch before 1.6 (torch.serialization.MAGIC_NUMBER)."""
_ZERO = re.compile(r"(?:\w*zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<model_rank>\d+)_(?P<kind>model|optim)_states\.pt")


# ---- Pickles -----------------------------------------------------------------------------------------------------------------


class Inert(dict[Any, Any]):
    """Placeholder for an object of a class, or the result of a function, that a pickle names. Keeps its arguments and state.

    A dict, as the class can be one: items are kept. Items of lists and sets of other classes are not.
    """

    path = ""
    """Full name of the class or function."""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *_: Any) -> Inert:
        """Stand for the result, too."""
        return self

    def append(self, _: Any) -> None:
        """Drop an item of a list or set."""

    extend = add = append
    __hash__ = object.__hash__  # type: ignore[assignment]  # it can be a key
    __eq__ = object.__eq__


class _Unpickler(pickle.Unpickler):
    """Reads plain values and containers, and placeholders for all others."""

    def __init__(self, file: IO[bytes] | mmap.mmap) -> None:
        super().__init__(file, encoding="utf-8")
        self._placeholders: dict[str, type[Inert]] = {}
        self.storages: dict[Any, str] = {}
        """Class of each storage that the pickle names, by its key."""

    def find_class(self, module: str, name: str) -> type[Inert]:
        path = f"{module}.{name}"
        return self._placeholders.setdefault(path, type("Inert", (Inert,), {"path": path}))

    def persistent_load(self, pid: Any) -> Any:
        self.storages[pid[2]] = pid[1].path
        return pid


class Archive:
    """What torch.save wrote: a file, or a part of one. Raises CheckpointError if it cannot be read."""

    def __init__(self, path: Path, first: int = 0, size_bytes: int | None = None) -> None:
        self._path, before = path, first % mmap.ALLOCATIONGRANULARITY
        with disk_errors(path, "read"), path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size - first if size_bytes is None else size_bytes
            with _refused(path):
                self._data = mmap.mmap(file.fileno(), before + size_bytes, offset=first - before, access=mmap.ACCESS_READ)
        self._places: dict[Any, tuple[int, int]] = {}
        """First byte and size of each storage."""
        with _refused(path):
            is_archive = self._data[before : before + 2] == b"PK"
            self.saved: Any = self._read_archive() if is_archive else self._read_old(before)

    def _read_archive(self) -> Any:
        mapped: Any = self._data  # which has the methods of a file that are used
        with zipfile.ZipFile(mapped) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        places = {name: self._place(info) for name, info in entries.items()}
        self._places = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
        first, size_bytes = places["data.pkl"]
        pickled = self._data[first : first + size_bytes]
        if zlib.crc32(pickled) != entries["data.pkl"].CRC:
            raise ValueError("data.pkl is damaged")
        first, size_bytes = places.get("byteorder", (0, 0))
        if size_bytes and self._data[first : first + size_bytes] != b"little":
            raise ValueError("its numbers are not little-endian")
        return _Unpickler(io.BytesIO(pickled)).load()

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        names = info.header_offset + 26  # the lengths of two fields before the content
        first = names + 4 + sum(int.from_bytes(self._data[at : at + 2], "little") for at in (names, names + 2))
        if info.compress_type != zipfile.ZIP_STORED or names < 0 or first + info.file_size > len(self._data):
            raise ValueError(f"{info.filename} is compressed, or not in the file")
        return first, info.file_size

    def _read_old(self, first: int) -> Any:
        """Read the format before torch 1.6: pickles, then the storages."""
        self._data.seek(first)
        if _Unpickler(self._data).load() != _OLD_FORMAT:
            raise ValueError("torch.save did not write it")
        _version, _sizes_of_integers = _Unpickler(self._data).load(), _Unpickler(self._data).load()
        unpickler = _Unpickler(self._data)
        saved, keys = unpickler.load(), _Unpickler(self._data).load()
        at = self._data.tell()
        for key in keys:
            size_bytes = int.from_bytes(self._data[at : at + 8], "little") * _STORAGES[unpickler.storages[key]].itemsize
            self._places[key] = at + 8, size_bytes
            at += 8 + size_bytes
        return saved

    def tensor(self, value: Any) -> Tensor | None:
        """Return the tensor that a value of the pickle describes, a view of the file; None if it describes no tensor.

        Raises CheckpointError if the file does not have its elements.
        """
        with _refused(self._path):
            return self._tensor(value)

    def _tensor(self, value: Any) -> Tensor | None:
        match getattr(value, "path", None), getattr(value, "args", ()):
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", (data, *_):
                return self._tensor(data)
            case "torch._tensor._rebuild_from_type_v2", (function, _, tuple(args), *_) if _is_class(function):
                return self._tensor(function(*args))
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", (storage, first, shape, strides, *_):
                return self._view(storage, _STORAGES[storage[1].path], first, _counts(shape), _counts(strides))
            case "torch._utils._rebuild_tensor_v3", (storage, first, shape, strides, _, _, dtype, *_):
                return self._view(storage, _DTYPES[dtype.path], first, _counts(shape), _counts(strides))
        return None

    def _view(self, storage: Any, dtype: torch.dtype, first: Any, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        _, _, key, _, _, *part_of_another = storage  # only in the old format
        start, size_bytes = self._places[key]
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0
        if any(part_of_another):
            raise ValueError("a storage is a part of another one")
        if not is_count(first) or (first + count) * dtype.itemsize > size_bytes or start + size_bytes > len(self._data):
            raise ValueError(f"a tensor of the shape {tuple(shape)} is larger than its part of the file")
        if not count:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():  # the map is read-only, and the tensor is only copied from
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._data, dtype=dtype, count=count, offset=start + first * dtype.itemsize)
        return flat.as_strided(tuple(shape), tuple(strides))


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Raise CheckpointError for any error: a broken pickle can raise all of them (Python's documentation of `pickle`)."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = f"{error} is missing or unknown" if isinstance(error, KeyError) else f"{str(error)[:200] or type(error).__name__}"
        raise CheckpointError(f"{path} is damaged, or has no weights that can be read ({why}): {_ADVICE}") from error


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Inert)


def _counts(value: Any) -> tuple[int, ...]:
    """Return a shape. Raises ValueError if it has anything but whole numbers."""
    counts = value.args[0] if getattr(value, "path", None) == "torch.Size" else value
    if not isinstance(counts, (tuple, list)) or not all(map(is_count, counts)):
        raise ValueError("a shape is invalid")
    return tuple(counts)


def open_pickle(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict in a file of torch.save, the innermost if it is one entry among others."""
    archive = Archive(path)
    return _innermost(path, archive.saved, lambda value: None if (it := archive.tensor(value)) is None else in_memory(it))


def _innermost(path: Path, saved: Any, found: Callable[[Any], StoredTensor | None]) -> dict[str, StoredTensor]:
    if isinstance(saved, Inert) and not saved:
        raise CheckpointError(f"{path} is an object of {saved.path}, not a state dict: {_ADVICE}")
    tensors: dict[str, StoredTensor] = {}
    for _ in range(len(NESTED) + 1):  # the innermost: a mean or a best score can be next to the weights
        if isinstance(saved, Mapping):
            tensors = {str(key): it for key, value in saved.items() if (it := found(value)) is not None} or tensors
            saved = next((saved[key] for key in NESTED if isinstance(saved.get(key), Mapping)), None)
    if not tensors:
        raise CheckpointError(f"{path} has no tensors by name, at the top or in {', '.join(NESTED)}: {_ADVICE}")
    return tensors


# ---- Tensors that are stored in parts ----------------------------------------------------------------------------------------

Part = tuple[Sequence[Region], Callable[[], Tensor]]
"""Elements of a tensor, and what returns them, in this order."""


def _joined(shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[Part]) -> StoredTensor:
    @torch.no_grad()
    def read_into(values: Tensor, wanted: Region) -> None:
        for regions, source in parts:
            common = [list(region.overlaps(wanted)) for region in regions]
            if not any(common):
                continue
            flat, first = source().contiguous().view(-1), 0
            for region, overlaps in zip(regions, common, strict=True):
                for both in overlaps:
                    elements = region.inside(both).rows(flat[first : first + region.count])
                    wanted.inside(both).rows(values).copy_(elements)
                first += region.count

    return StoredTensor(shape, dtype, read_into)


def in_memory(tensor: Tensor) -> StoredTensor:
    """Return a tensor, which can be a view of a file, as a stored one."""
    return _joined(tuple(tensor.shape), tensor.dtype, [([Region.flat(0, tensor.numel())], lambda: tensor)])


def _in_a_row(name: str, shape: tuple[int, ...], tensors: Iterable[Tensor]) -> StoredTensor:
    """Return 1-D tensors, one after another, as one stored tensor."""
    parts: list[Part] = []
    at, dtype = 0, torch.float32
    for tensor in tensors:
        parts.append(([Region.flat(at, len(tensor))], partial(Tensor.view, tensor, -1)))
        at, dtype = at + len(tensor), tensor.dtype
    if at != prod(shape):
        raise ValueError(f"{name} has {prod(shape)} elements, and the files have {at}")
    return _joined(shape, dtype, parts)


def _cut(tensors: Iterable[Tensor], first: int, count: int) -> Iterator[Tensor]:
    """Yield `count` elements from `first` on of 1-D tensors in a row."""
    for tensor in tensors:
        if len(part := tensor[max(0, first) : max(0, first + count)]):
            yield part
        first -= len(tensor)


# ---- DCP: torch.distributed.checkpoint ---------------------------------------------------------------------------------------


def open_dcp(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of a folder of DCP, given its file `.metadata`. Raises CheckpointError."""
    with disk_errors(path, "read"):
        raw = path.read_bytes()
    with _refused(path):
        metadata = _Unpickler(io.BytesIO(raw)).load().state
        stored = {}
        for index, info in metadata["storage_data"].items():
            if index.state.get("offset") is not None:  # else it is no tensor
                stored[index.state["fqn"], _counts(index.state["offset"])] = info.state
        paths = metadata["planner_data"] if isinstance(metadata["planner_data"], Mapping) else {}
        tree: dict[str, Any] = {}
        for name, it in metadata["state_dict_metadata"].items():
            *folders, last = map(str, paths.get(name, (name,)))
            inside = tree
            for folder in folders:
                inside = inside.setdefault(folder, {})
            inside[last] = name, it.state

        def found(leaf: Any) -> StoredTensor | None:
            if not isinstance(leaf, tuple) or "chunks" not in (leaf[1] or ()):
                return None
            return _dcp_tensor(path.parent, leaf[0], leaf[1], stored)

        return _innermost(path, tree, found)


def _dcp_tensor(folder: Path, name: str, about: Mapping[str, Any], stored: Mapping[Any, Mapping[str, Any]]) -> StoredTensor:
    shape, dtype = _counts(about["size"]), _DTYPES[about["properties"].state[0].path]
    parts: list[Part] = []
    for chunk in about["chunks"]:
        offsets, sizes = _counts(chunk.state["offsets"]), _counts(chunk.state["sizes"])
        info = stored[name, offsets]
        file, first, size_bytes = info["relative_path"], info["offset"], info["length"]
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ValueError(f"it names {file!r}, which is not a file in its folder")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} is stored as {info['transform_descriptors']!r:.80}")
        with disk_errors(folder / file, "read"):
            end = (folder / file).stat().st_size
        if not is_count(first) or not prod(sizes) * dtype.itemsize <= size_bytes <= end - first:
            raise ValueError(f"{name}, {sizes}, is not in {size_bytes} bytes at {first} of {file}, which has {end}")
        parts.append((_rectangle(shape, offsets, sizes), partial(_chunk, folder / file, first, size_bytes, sizes, dtype)))
    ranges = sorted((region, str(at)) for at, (regions, _) in enumerate(parts) for region in regions)
    if problem := TensorEntry(shape, "", ranges).problem():
        raise ValueError(f"{name}: {problem}")
    return _joined(shape, dtype, parts)


def _chunk(path: Path, first: int, size_bytes: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read a part of a tensor. Nothing stays open: a folder can have many thousands."""
    archive = Archive(path, first, size_bytes)
    tensor = archive.tensor(archive.saved)
    if tensor is None or (tuple(tensor.shape), tensor.dtype) != (sizes, dtype):
        raise CheckpointError(f"{path} is damaged: it has no {dtype} of the shape {sizes}, which .metadata describes")
    return tensor


def _rectangle(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
    """Return the elements of a rectangle of a tensor, in its own order."""
    if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a part with the shape {sizes} at {offsets} is not inside of the shape {shape}")
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    rows = max(0, cut - 1)
    while rows and sizes[rows] == shape[rows]:  # the rows of such dimensions are at even distances
        rows -= 1
    run, start = prod(sizes[cut:]), sum(map(int.__mul__, offsets, strides))
    count, stride = run * prod(sizes[rows:cut]), strides[cut - 1] if cut else run
    outer = product(*map(range, sizes[:rows])) if count else ()
    return [Region.made(start + sum(map(int.__mul__, index, strides)), count, run, stride) for index in outer]


def write_dcp(folder: Path, contents: Mapping[str, Content]) -> None:
    """Write tensors as a folder of DCP, with memory for the largest of them, twice. Raises CheckpointError."""
    from torch.distributed import checkpoint as dcp  # takes a second

    class OneByOne(dcp.DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Tensor:
            content = contents[index.fqn]
            return torch.frombuffer(bytearray().join(content.chunks), dtype=torch_dtype(content.dtype)).view(content.shape)

    empty = {name: torch.empty(it.shape, dtype=torch_dtype(it.dtype), device="meta") for name, it in contents.items()}
    with disk_errors(folder, "written"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)  # it keeps all tensors of a file in memory
        dcp.save(empty, storage_writer=writer, planner=OneByOne(), no_dist=True)


# ---- DeepSpeed's ZeRO: as deepspeed/utils/zero_to_fp32.py (0.19.8) joins the parts of the ranks ------------------------------


def in_deepspeed(folder: Path) -> Path | None:
    """Return the first file of the model's state in a folder of DeepSpeed, or in the one that its file `latest` names."""
    latest = folder / "latest"
    if latest.is_file():
        with disk_errors(latest, "read"):
            tag = latest.read_text(errors="replace").strip()
        if tag in ("", "..") or Path(tag).name != tag:
            raise CheckpointError(f"{latest} names {tag!r}, which is not in its folder: it cannot be used")
        folder = folder / tag
    return next(iter(_of_ranks(folder, "model")), None)


def _of_ranks(folder: Path, kind: str) -> list[Path]:
    """Return the files of a kind, by rank. Raises CheckpointError if the model itself was split."""
    found = [(it, path) for path in folder.glob("*_states.pt") if (it := _ZERO.fullmatch(path.name)) and it["kind"] == kind]
    if split := next((path for it, path in found if int(it["model_rank"])), None):
        raise CheckpointError(f"{split} is of a model that DeepSpeed had split, which cannot be read: export its weights")
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0]["rank"] or 0))]


def open_deepspeed(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of a folder of DeepSpeed, given the file of `in_deepspeed`: the float32 ones."""
    optimizers = [Archive(it) for it in _of_ranks(path.parent, "optim")]
    if not optimizers:
        return open_pickle(path)
    with _refused(path.parent):
        return _zero(optimizers, [Archive(it) for it in _of_ranks(path.parent, "model")])


def _zero(optimizers: Sequence[Archive], models: Sequence[Archive]) -> dict[str, StoredTensor]:
    about, states = models[0].saved, [it.saved["optimizer_state_dict"] for it in optimizers]
    stage, ranks = states[0]["zero_stage"], states[0]["partition_count"]
    stage, ranks = stage.args[0] if isinstance(stage, Inert) else stage, max(ranks) if isinstance(ranks, list) else ranks
    if len(states) != ranks or len(models) not in (1, ranks):
        raise ValueError(f"{ranks} ranks wrote it, and it has files of {min(len(states), len(models))}")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = [[_flat(archive, it) for it in state[key]] for archive, state in zip(optimizers, states, strict=True)]
    tensors = {name: in_memory(_flat(models[0], about["module"][name], whole=True)) for name in about["buffer_names"]}
    for name, size in (about.get("frozen_param_shapes") or {}).items():
        kept = [_flat(it, it.saved["frozen_param_fragments"][name]) for it in (models if stage == 3 else models[:1])]
        tensors[name] = _in_a_row(name, _counts(size), _cut(kept, 0, prod(_counts(size))))
    shapes = [{name: _counts(size) for name, size in group.items()} for group in about["param_shapes"]]
    if stage == 3:  # each rank has its share of each parameter, which is padded
        first = 0
        for name, shape in [pair for group in shapes for pair in group.items()]:
            share = math.ceil(prod(shape) / ranks)
            kept = [part for own in groups for part in _cut(own, first, share)]
            tensors[name], first = _in_a_row(name, shape, _cut(kept, 0, prod(shape))), first + share
    else:  # each rank has its share of a row of all parameters
        paddings = states[0].get("param_alignment_paddings")
        for at, group in enumerate(shapes):
            row, first = [own[at] for own in groups], 0
            for (name, shape), padding in zip(group.items(), paddings[at] if paddings else [0] * len(group), strict=True):
                tensors[name] = _in_a_row(name, shape, _cut(row, first, prod(shape)))
                first += prod(shape) + padding
    return tensors | {name: tensors[same] for name, same in about["shared_params"].items() if same in tensors}


def _flat(archive: Archive, value: Any, *, whole: bool = False) -> Tensor:
    tensor = archive.tensor(value)
    if tensor is None:
        raise ValueError("a part of a rank is not a tensor")
    return tensor if whole else tensor.reshape(-1)
