"""Weights in files, of this application or others: their names, shapes and types, and how to read them.

Safetensors files and what `torch.save` made of a state dict, alone or divided among files with an index, and checkpoints. No
code in a file is run: of a pickle only tensors and plain containers are taken (`weights_only`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.tensor_file import Content, TensorFile
from app.errors import CheckpointError
from app.files import other_libraries, paths
from app.files.atomic_files import disk_errors
from app.files.lines import parsed
from app.init import accounting, held
from app.init.region import Piece, Region
from app.runs import run_folder
from app.task import Adapters, LowRank

Shape = tuple[int, ...]

IN_FOLDERS = (run_folder.MODEL, run_folder.MODEL_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights that a folder is taken for: of a finished run, and of transformers."""
_COMPARED = 1 << 20
"""Elements that are compared at a time."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Where programs put the weights into what they save beside them."""


class ReadInto(Protocol):
    """How stored tensors are read."""

    def __call__(self, name: str, values: torch.Tensor, region: Region | None = None, /) -> None:
        """Fill `values`, 1-D, with the elements `region` of the tensor of a name, all by default, in their dtype."""


@dataclass(frozen=True)
class Stored:
    """Tensors on disk, by their names there."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype | str]
    """A text is the name of a type that torch has not."""
    read_into: ReadInto
    remarks: tuple[str, ...] = ()
    """What a reader should know of how they were found, a phrase each."""

    def renamed(self, names: Mapping[str, str], *remarks: str) -> Stored:
        """Return the tensors by other names; `names` has for each the one that it has on disk."""
        return Stored(
            {name: self.shapes[there] for name, there in names.items()},
            {name: self.dtypes[there] for name, there in names.items()},
            lambda name, values, region=None: self.read_into(names[name], values, region),
            (*self.remarks, *remarks),
        )


def in_folder(folder: Path) -> Path | None:
    """Return the file, or the index of files, that has the weights of a folder; None: there is none."""
    return next((folder / name for name in IN_FOLDERS if (folder / name).exists()), None)


@torch.no_grad()
def fill(model: torch.nn.Module, stored: Stored) -> None:
    """Give a model that is not prepared its tensors, all of which must be there, and no other.

    A rank that has a share of it reads that alone; a whole one takes their precision. A tensor of several names, as tied
    embeddings have, is stored once. Raises CheckpointError.
    """
    dtypes = [it for it in stored.dtypes.values() if isinstance(it, torch.dtype) and it.is_floating_point and it.itemsize > 1]
    if dtypes and not held.is_divided(model):
        model.to(dtypes[0])
    tensors = fitting(model, stored)
    for name in stored.shapes:
        stored.read_into(name, tensors[name].values, tensors[name].region)


def fitting(model: torch.nn.Module, stored: Stored) -> dict[str, Piece]:
    """Return a model's tensors by the names that are stored. Raises CheckpointError if others are stored, or not all."""
    tensors = named(model, stored.shapes)
    if wrong := {**differences(tensors, stored), **contradictions(tensors, stored)}:
        raise CheckpointError(accounting.listed(wrong.values()))
    return tensors


def named(model: torch.nn.Module, stored: Collection[str]) -> dict[str, Piece]:
    """Return a model's tensors by name; of one that has several, as tied embeddings have, by those that are stored."""
    all_held = held.held(model)
    tensors = {name: all_held[name] for name in model.state_dict(keep_vars=True)}
    there = {id(tensor) for name, tensor in tensors.items() if name in stored}
    return {name: tensor for name, tensor in tensors.items() if name in stored or id(tensor) not in there}


def differences(tensors: Mapping[str, Piece], stored: Stored) -> dict[str, str]:
    """Say by name what cannot be taken of what is stored for these tensors of a model."""
    both = [name for name in tensors if name in stored.shapes]
    told = accounting.differences(
        [name for name in tensors if name not in stored.shapes],
        [name for name in stored.shapes if name not in tensors],
        [(name, stored.shapes[name], tensors[name].shape) for name in both if stored.shapes[name] != tensors[name].shape],
    )
    for name in both:
        there, here = stored.dtypes[name], tensors[name].values.dtype
        if not isinstance(there, torch.dtype) or (here.is_floating_point and not there.is_floating_point):
            told.setdefault(name, f"{name} is {word(there)} in the file and {word(here)} in the model")
    return told


@torch.no_grad()
def contradictions(tensors: Mapping[str, Piece], stored: Stored) -> dict[str, str]:
    """Say by name which tensors that are stored by several names, because the model ties them, have different values there."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(it), name)) for name, it in tensors.items() if name in stored.shapes]
    ties = [(one, other) for one, other in pairs if one != other and stored.shapes[one] == stored.shapes[other]]
    return accounting.differences((), (), ties=[one for one, other in ties if not _are_equal(stored, tensors[one], one, other)])


def _are_equal(stored: Stored, tensor: Piece, one: str, other: str) -> bool:
    for part in tensor.region.pieces(_COMPARED):
        values, others = (torch.empty(part.count, dtype=tensor.values.dtype) for _ in range(2))
        stored.read_into(one, values, part)
        stored.read_into(other, others, part)
        if not torch.allclose(values, others, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def word(dtype: torch.dtype | str) -> str:
    """Return how people write a type."""
    return str(dtype).removeprefix("torch.")


def open_stored(place: Path) -> Stored:
    """Return what a file holds, an index names, or a checkpoint. Raises CheckpointError if it cannot be read."""
    if place.is_dir():
        return _of_checkpoint(place)
    return _of_index(place) if place.name.endswith(".index.json") else _of_file(place)


def _of_file(path: Path) -> Stored:
    with disk_errors(path, "read"), paths.open_regular(path) as opened:
        begin = opened.read(4)
    if begin.startswith((b"PK", b"\x80")):  # a zip archive, as torch.save writes it, or a bare pickle
        return _of_pickle(path)
    file = TensorFile(path)
    dtypes = {name: tensor_file.dtype_in_torch(it) for name, it in file.dtypes.items()}
    return Stored(file.shapes, dtypes, file.read_into)


def _of_index(path: Path) -> Stored:
    """A model that transformers has divided among files beside the index."""
    with disk_errors(path, "read"):
        text = paths.read_regular(path)
    try:
        file_of = {str(name): str(file) for name, file in parsed(text)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: it has no weight_map from names to files") from error
    if outside := next((file for file in file_of.values() if Path(file).name != file), None):
        raise CheckpointError(f"{path} names {outside}, which is not a file in its folder: it cannot be used")
    parts = {file: _of_file(path.parent / file) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in parts[file].shapes:
            raise CheckpointError(f"{path} says that {name} is in {file}, but it is not")
    return Stored(
        {name: parts[file].shapes[name] for name, file in file_of.items()},
        {name: parts[file].dtypes[name] for name, file in file_of.items()},
        lambda name, values, region=None: parts[file_of[name]].read_into(name, values, region),
    )


def _of_pickle(path: Path) -> Stored:
    try:
        saved = other_libraries.pickled(path)
    except Exception as error:  # a broken pickle may raise anything (Python's documentation of `pickle`)
        why = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be loaded as weights only ({why}). Save model.state_dict() with torch.save, on "
            "the machine that made the file"
        ) from error
    remarks = []
    while isinstance(saved, Mapping) and not any(map(torch.is_tensor, saved.values())):
        inside = next((key for key in _NESTED if isinstance(saved.get(key), Mapping)), None)
        if inside is None:
            break
        saved = saved[inside]
        remarks.append(f"those in {inside!r}")
    tensors = {str(key): it for key, it in saved.items() if torch.is_tensor(it)} if isinstance(saved, Mapping) else {}
    if not tensors:
        found = f"a mapping of {', '.join(map(str, list(saved)[:8]))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise CheckpointError(f"{path} has no tensors by name, at the top or in {', '.join(_NESTED)}: it holds {found}")
    if len(saved) > len(tensors):
        remarks.append(f"without {len(saved) - len(tensors)} entries that are not tensors")
    return Stored(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: tensor.dtype for name, tensor in tensors.items()},
        lambda name, values, region=None: _copy(tensors[name], values, region),
        tuple(remarks),
    )


@torch.no_grad()
def _copy(source: torch.Tensor, values: torch.Tensor, region: Region | None) -> None:
    whole = source.contiguous()
    values.copy_(whole.view(-1) if region is None else region.take(whole))


def _of_checkpoint(folder: Path) -> Stored:
    reader = files.Reader(folder)
    key, buffers = reader.finished_key(), reader.buffers()
    shapes = reader.shapes(key)
    dtypes = {name: tensor_file.dtype_in_torch(dtype) for name, dtype in reader.dtypes(key).items()}

    def read_into(name: str, values: torch.Tensor, region: Region | None = None) -> None:
        if name in buffers:
            _copy(buffers[name], values, region)
        else:
            reader.read_into(Piece(key, name, shapes[name], region or Region.flat(0, values.numel()), values))

    return Stored(
        shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()},
        dtypes | {name: buffer.dtype for name, buffer in buffers.items()},
        read_into,
    )


# ---- Adapters: small matrices beside a weight, which are added to it for files of plain weights. Only they are whole in memory


def merged(contents: Mapping[str, Content], adapters: Adapters | None) -> dict[str, Content]:
    """Return the weights of a model as a plain one has them. Each of the given contents may be taken once."""
    if adapters is None:
        return dict(contents)
    found = {}
    for name, content in contents.items():
        plain, low = adapters.names.get(name, name), adapters.sums.get(adapters.names.get(name, name))
        if name not in adapters.alone:
            added = content if low is None else _added(content, contents[low.down], contents[low.up], low)
            found[plain] = added
    return found


def as_here(stored: Stored, adapters: Adapters | None) -> Stored:
    """Return stored weights by the names that the model has for them; those of a run with such matrices have these."""
    if adapters is None:
        return stored
    here = {there: name for name, there in adapters.names.items()}
    return stored.renamed({here.get(name, name): name for name in stored.shapes})


def _added(base: Content, down: Content, up: Content, low: LowRank) -> Content:
    return Content(base.dtype, base.shape, _sums(base, down, up, low))


def _sums(base: Content, down: Content, up: Content, low: LowRank) -> Iterator[bytes]:
    """Yield the chunks of the weight with the product added, in float64 until they are rounded to the weight's type."""
    columns, dtype = base.shape[1], tensor_file.dtype_in_torch(base.dtype)
    assert isinstance(dtype, torch.dtype)
    left, right = (_tensor(up), _tensor(down)) if not low.transposed else (_tensor(down).T, _tensor(up).T)
    at = 0
    for chunk in base.chunks:
        values = torch.frombuffer(bytearray(chunk), dtype=dtype)
        first, end = at // columns, -(-(at + len(values)) // columns)
        product = (left[first:end] @ right).flatten()[at - first * columns :][: len(values)]
        yield _bytes((values.double() + low.factor * product).to(dtype))
        at += len(values)


def _tensor(content: Content) -> torch.Tensor:
    dtype = tensor_file.dtype_in_torch(content.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.frombuffer(bytearray(_joined(content.chunks)), dtype=dtype).view(content.shape).double()


def _joined(chunks: Iterable[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def _bytes(values: torch.Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()
