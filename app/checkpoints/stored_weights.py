"""Weights in files, of this application or others: their names, shapes and types, and how to read them.

Safetensors files and what `torch.save` made of a state dict, alone or divided among files with an index, and checkpoints. No
code in a file is run: of a pickle only tensors and plain containers are taken (`weights_only`).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.durable import telling
from app.checkpoints.piece import Piece
from app.checkpoints.tensor_file import TensorFile
from app.errors import CheckpointError
from app.files import regular
from app.initial import held
from app.initial.region import Region
from app.record import run_folder

Shape = tuple[int, ...]

IN_FOLDERS = (run_folder.MODEL, run_folder.MODEL_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights that a folder is taken for: of a finished run, and of transformers."""
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
    dtypes = [it for it in stored.dtypes.values() if isinstance(it, torch.dtype) and it.is_floating_point]
    if dtypes and not held.is_divided(model):
        model.to(dtypes[0])
    tensors = fitting(model, stored)
    for name in stored.shapes:
        stored.read_into(name, tensors[name].values, tensors[name].region)


def fitting(model: torch.nn.Module, stored: Stored) -> dict[str, held.Held]:
    """Return a model's tensors by name. Raises CheckpointError if others are stored."""
    all_held = held.held(model)
    tensors = {name: all_held[name] for name in model.state_dict(keep_vars=True)}
    there = {id(tensor) for name, tensor in tensors.items() if name in stored.shapes}
    for name in tensors.keys() | stored.shapes.keys():
        if name not in tensors:
            raise CheckpointError(f"the model has no {name}")
        shape = tensors[name].shape
        if stored.shapes.get(name, shape) != shape or (name not in stored.shapes and id(tensors[name]) not in there):
            raise CheckpointError(f"{name} is {stored.shapes.get(name, 'not there')} but must be {shape}")
    return tensors


def open_stored(place: Path) -> Stored:
    """Return what a file holds, an index names, or a checkpoint. Raises CheckpointError if it cannot be read."""
    if place.is_dir():
        return _of_checkpoint(place)
    return _of_index(place) if place.name.endswith(".index.json") else _of_file(place)


def _of_file(path: Path) -> Stored:
    with telling(path, "read"), regular.opened(path) as opened:
        begin = opened.read(4)
    if begin.startswith((b"PK", b"\x80")):  # a zip archive, as torch.save writes it, or a bare pickle
        return _of_pickle(path)
    file = TensorFile(path)
    dtypes = {name: tensor_file.dtype_in_torch(it) for name, it in file.dtypes.items()}
    return Stored(file.shapes, dtypes, file.read_into)


def _of_index(path: Path) -> Stored:
    """A model that transformers has divided among files beside the index."""
    with telling(path, "read"):
        text = regular.content(path)
    try:
        file_of = {str(name): str(file) for name, file in json.loads(text)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: it has no weight_map from names to files") from error
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
        # Torch's older files are no archives, and cannot be mapped.
        saved: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
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
