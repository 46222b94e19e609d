"""Weights in files, of this application or others, and the model file of a run, `model.safetensors` with `model.json`.

Safetensors files and state dicts of `torch.save`, alone or split into files with an index, and checkpoints. No code in a file
is run: only tensors and plain containers of a pickle are loaded (`weights_only`).

The weights load into the plain model that the task builds, for example torchvision's, without this package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app import tasks
from app.checkpoints import step_folders, tensor_file
from app.checkpoints.tensor_file import Content, TensorFile, torch_dtype
from app.environment.topology import listed
from app.errors import CheckpointError, RecipeError, RunFolderError, printable
from app.files import other_libraries
from app.files.atomic_files import disk_errors
from app.files.text_files import parsed
from app.init import filling, model_tensors
from app.init.region import Piece, Region
from app.recipe import recipe_file, task_file
from app.recipe.schema import Recipe
from app.runs import run_folder
from app.runs.claim import Claim
from app.task import Adapters, LowRank, Task

IN_FOLDERS = (run_folder.MODEL, run_folder.MODEL_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights in the folder of a finished run, and of transformers."""
_COMPARED = 1 << 20
"""Elements that are compared at a time."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which programs save the weights, next to other state."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read_into: Callable[[torch.Tensor, Region], None]
    """Fills values, 1-D, with the elements of a region of the tensor, converted to their dtype."""


StoredWeights = Mapping[str, StoredTensor]
"""The tensors of a model, by their names on disk."""


def in_folder(folder: Path) -> Path | None:
    """Return the file with the weights of a folder, or the index of several, if it has one."""
    return next((folder / name for name in IN_FOLDERS if (folder / name).exists()), None)


@torch.no_grad()
def fill(model: torch.nn.Module, stored: StoredWeights) -> None:
    """Read all tensors of a model that is not prepared. Raises CheckpointError if some are missing or left over.

    A rank that has a share of the model reads that alone; a whole model gets their precision. A tensor with several names,
    such as tied embeddings, is stored once.
    """
    dtypes = [it.dtype for it in stored.values() if it.dtype.is_floating_point and it.dtype.itemsize > 1]
    if dtypes and not model_tensors.is_sharded(model):
        model.to(dtypes[0])
    tensors = fitting(model, stored)
    for name, it in stored.items():
        it.read_into(tensors[name].values, tensors[name].region)


def fitting(model: torch.nn.Module, stored: StoredWeights) -> dict[str, Piece]:
    """Return a model's tensors by their stored names. Raises CheckpointError if they belong to another model."""
    tensors = named(model, stored)
    if wrong := {**differences(tensors, stored), **contradictions(tensors, stored)}:
        raise CheckpointError(listed([*wrong.values()]))
    return tensors


def named(model: torch.nn.Module, stored: Collection[str]) -> dict[str, Piece]:
    """Return a model's tensors by name; a tensor with several, such as tied embeddings, by those that are stored."""
    pieces = model_tensors.local_pieces(model)
    tensors = {name: pieces[name] for name in model.state_dict(keep_vars=True)}
    there = {id(tensor) for name, tensor in tensors.items() if name in stored}
    return {name: tensor for name, tensor in tensors.items() if name in stored or id(tensor) not in there}


def differences(tensors: Mapping[str, Piece], stored: StoredWeights) -> dict[str, str]:
    """Return a phrase for each name, of these tensors of a model and of the stored ones, that does not fit."""
    both = [(name, stored[name], tensors[name]) for name in tensors if name in stored]
    phrases = model_tensors.name_differences(
        [name for name in tensors if name not in stored],
        [name for name in stored if name not in tensors],
        [(name, there.shape, here.shape) for name, there, here in both if there.shape != here.shape],
    )
    for name, there, here in both:
        if here.values.dtype.is_floating_point and not there.dtype.is_floating_point:
            phrases.setdefault(name, f"{name} is {word(there.dtype)} in the file and {word(here.values.dtype)} in the model")
    return phrases


@torch.no_grad()
def contradictions(tensors: Mapping[str, Piece], stored: StoredWeights) -> dict[str, str]:
    """Return a phrase for each tensor that the model ties to another, and that is stored with other values."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(it), name)) for name, it in tensors.items() if name in stored]
    ties = [(one, other) for one, other in pairs if one != other and stored[one].shape == stored[other].shape]
    return model_tensors.tie_differences(one for one, other in ties if not _are_equal(tensors[one], stored[one], stored[other]))


def _are_equal(tensor: Piece, one: StoredTensor, other: StoredTensor) -> bool:
    for part in tensor.region.pieces(_COMPARED):
        values, others = (torch.empty(part.count, dtype=tensor.values.dtype) for _ in range(2))
        one.read_into(values, part)
        other.read_into(others, part)
        if not torch.allclose(values, others, rtol=0, atol=0, equal_nan=True):
            return False
    return True


def word(dtype: torch.dtype) -> str:
    """Return a type as people write it."""
    return str(dtype).removeprefix("torch.")


def open_stored(place: Path) -> StoredWeights:
    """Return the tensors of a file, of an index of files, or of a checkpoint. Raises CheckpointError if it cannot be read."""
    if place.is_dir():
        return _open_checkpoint(place)
    return _open_index(place) if place.name.endswith(".index.json") else _open_file(place)


def _open_file(path: Path) -> StoredWeights:
    with disk_errors(path, "read"), path.open("rb") as opened:
        begin = opened.read(4)
    if begin.startswith((b"PK", b"\x80")):  # a zip archive, as torch.save writes it, or a bare pickle
        return _open_pickle(path)
    if path.suffix in (".bin", ".ckpt", ".pt", ".pth"):
        raise CheckpointError(f"{path} is damaged, or not weights: it does not begin as a file of torch.save does")
    file = TensorFile(path)
    return {
        name: StoredTensor(shape, torch_dtype(file.dtypes[name]), partial(file.read_into, name))
        for name, shape in file.shapes.items()
    }


def _open_index(path: Path) -> StoredWeights:
    """Open a model that transformers has split into files next to the index."""
    with disk_errors(path, "read"):
        text = path.read_bytes()
    try:
        file_of = {str(name): str(file) for name, file in parsed(text)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: it has no weight_map from names to files") from error
    if outside := next((file for file in file_of.values() if Path(file).name != file), None):
        raise CheckpointError(f"{path} names {outside}, which is not a file in its folder: it cannot be used")
    parts = {file: _open_file(path.parent / file) for file in sorted(set(file_of.values()))}
    if missing := next((name for name, file in file_of.items() if name not in parts[file]), None):
        raise CheckpointError(f"{path} names {missing}, which is not in {file_of[missing]}")
    return {name: parts[file][name] for name, file in file_of.items()}


def _open_pickle(path: Path) -> StoredWeights:
    try:
        saved = other_libraries.pickled(path)
    except Exception as error:  # a broken pickle may raise anything (Python's documentation of `pickle`)
        # torch's sentence is between advice for files that are trusted.
        why = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0].partition(". ")[0]
        if other := re.search(r"GLOBAL (\S+)", str(error)):
            why = f"it holds {other[1]}, which is not a tensor"
        raise CheckpointError(
            f"{path} cannot be loaded as weights only ({why}). Save model.state_dict() with torch.save, on "
            "the machine that made the file"
        ) from error
    tensors: dict[str, torch.Tensor] = {}
    for _ in range(len(_NESTED) + 1):  # the innermost: a mean or a best score can be next to the weights
        if isinstance(saved, Mapping):
            tensors = {str(key): it for key, it in saved.items() if torch.is_tensor(it)} or tensors
            saved = next((saved[key] for key in _NESTED if isinstance(saved.get(key), Mapping)), None)
    if not tensors:
        raise CheckpointError(f"{path} has no tensors by name, at the top or in {', '.join(_NESTED)}")
    return {name: _in_memory(tensor) for name, tensor in tensors.items()}


def _in_memory(source: torch.Tensor) -> StoredTensor:
    @torch.no_grad()
    def read_into(values: torch.Tensor, region: Region) -> None:
        values.copy_(region.take(source.contiguous()))

    return StoredTensor(tuple(source.shape), source.dtype, read_into)


def _open_checkpoint(folder: Path) -> StoredWeights:
    reader = step_folders.Reader(folder)
    key = reader.finished_key()

    def read_into(name: str, shape: tuple[int, ...], values: torch.Tensor, region: Region) -> None:
        reader.read_into(Piece(key, name, shape, region, values))

    return {
        name: StoredTensor(it.shape, torch_dtype(it.dtype), partial(read_into, name, it.shape))
        for name, it in reader.tensors(key).items()
    } | {name: _in_memory(buffer) for name, buffer in reader.buffers().items()}


# ---- Adapters: small matrices that are added to a weight for files of plain weights. Only they are whole in memory -----------


def merged(contents: Mapping[str, Content], adapters: Adapters | None) -> dict[str, Content]:
    """Return the weights of a plain model, with the adapters added. Each of the given contents can be read once."""
    if adapters is None:
        return dict(contents)
    plain = {}
    for name, content in contents.items():
        if name not in adapters.alone:
            there = adapters.names.get(name, name)
            low = adapters.sums.get(there)
            sums = content.chunks if low is None else _sums(content, contents[low.down], contents[low.up], low)
            plain[there] = Content(content.dtype, content.shape, sums)
    return plain


def _sums(base: Content, down: Content, up: Content, low: LowRank) -> Iterator[bytes]:
    """Yield the chunks of a weight plus the adapters' product, in float64 until they are rounded to the weight's type."""
    columns, dtype = base.shape[1], torch_dtype(base.dtype)
    left, right = (tensor_of(down).T, tensor_of(up).T) if low.transposed else (tensor_of(up), tensor_of(down))
    at = 0
    for chunk in base.chunks:
        values = torch.frombuffer(bytearray(chunk), dtype=dtype)
        first, end = at // columns, -(-(at + len(values)) // columns)
        product = (left[first:end] @ right).flatten()[at - first * columns :][: len(values)]
        yield (values.double() + low.factor * product).to(dtype).view(torch.uint8).numpy().tobytes()
        at += len(values)


def tensor_of(content: Content) -> torch.Tensor:
    """Return a tensor, float64."""
    whole = bytearray().join(content.chunks)
    return torch.frombuffer(whole, dtype=torch_dtype(content.dtype)).view(content.shape).double()


def described(recipe: Recipe, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values that rebuild the model of a finished run, for samples with these facts."""
    own, names = recipe_file.own_sections(recipe.task), [it.name for it in fields(recipe.sections)]
    # What is trained, and not in the file of weights, such as adapters, which are added to the weights.
    gone = {f"{name}.{key}" for name in names for key in getattr(getattr(recipe.sections, name), "not_left", ())}
    values = {key: value for key, value in recipe_file.flat(recipe).items() if key.partition(".")[0] in own and key not in gone}
    about = {"recipe": {"task": recipe.task, **values}, "facts": dict(facts)}
    return about if recipe.task in tasks.SHIPPED else {**about, "task_digest": tasks.digest(recipe.task)}


def save(
    claim: Claim, description: Mapping[str, Any], weights: Mapping[str, Content], beside: Mapping[str, bytes] | None = None
) -> None:
    """Write the weights (by name) and the result of `described` into the run folder, each whole or not at all.

    `beside` are further files by their names, with which the task's library can load the run folder too.
    Raises CheckpointError or RunFolderError if the disk refuses.
    """
    with claim.staged(run_folder.MODEL) as path:
        tensor_file.write(path, weights, tensor_file.OF_TORCH)
    for name, content in (beside or {}).items():
        claim.write_bytes(name, content)
    claim.write_json(run_folder.MODEL_CONFIG, dict(description))


def load(
    run_dir: Path, task_at: str | None = None, *, built: Callable[[Task, Any], torch.nn.Module] = filling.whole_model
) -> tuple[Task, torch.nn.Module, Mapping[str, Any]]:
    """Return a finished run's task, its trained model, in evaluation mode, and the facts of its samples.

    `run_dir` can be a checkpoint, with adapters apart from frozen weights. `task_at` is the present path of the user's task
    file, if it has moved. Prints a note on stderr if the file has changed. `built` builds the task's model for these facts, by
    default whole and on the CPU; the tensors that it has are read.

    Raises RunFolderError if the run is not finished or one of its files is broken.
    """
    about, path = run_dir / run_folder.MODEL_CONFIG, in_folder(run_dir)
    if step_folders.is_checkpoint(run_dir):
        about, path, state = run_dir / step_folders.STATE, run_dir, step_folders.Reader(run_dir).state
        described = {**state["model"], "recipe": state["recipe"]}
    else:
        described = run_folder.read_json(about)
    if path is None:
        raise RunFolderError(f"{run_dir / run_folder.MODEL} is missing: {run_dir} is not the folder of a finished run.")
    try:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in described["recipe"].items()}
        if task_at is not None:
            values["task"] = task_file.located(task_at, Path())
        elif task_file.is_own(str(values["task"])) and not Path(str(values["task"])).exists():
            raise RunFolderError(
                f"the task file of {run_dir} was {values['task']}, which no longer exists: give its new place "
                "with --task FILE, or task=FILE."
            )
        task, facts = tasks.of(recipe_file.build(values)), described["facts"]
        model = built(task, facts)
    except (AttributeError, KeyError, TypeError, ValueError, RecipeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RunFolderError(
            f"{about} does not describe the model: {why}. It is damaged, or was written by another version of "
            "Samerun: use that version."
        ) from error
    try:
        fill(model, open_stored(path))
    except CheckpointError as error:
        raise RunFolderError(f"{path} does not contain the weights of the model described in {about}: {error}") from error
    if described.get("task_digest", "none") != tasks.digest(str(values["task"])):
        note = f"note: {values['task']}, or a file it imports, has changed since {run_dir} was trained\n"
        sys.stderr.write(printable(note))
    return task, model.eval(), facts
