"""Weights in files, of this application or others, and the model file of a run, `model.safetensors` with `model.json`.

Safetensors files and state dicts of `torch.save`, alone or split into files with an index, and checkpoints, also from other
programs (foreign_weights.py). No code in a file is run.

The weights load into the plain model that the task builds, for example torchvision's, without this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from app import tasks
from app.checkpoints import foreign_weights, step_folders, tensor_file
from app.checkpoints.tensor_file import Content, StoredTensor, StoredWeights, TensorFile, torch_dtype
from app.environment.topology import listed
from app.errors import CheckpointError, RecipeError, RunFolderError, printable
from app.files.atomic_files import disk_errors
from app.files.text_files import parsed
from app.init import filling, model_tensors
from app.init.region import Piece, Region
from app.recipe import recipe_file, task_file
from app.recipe.schema import Recipe
from app.runs import run_folder
from app.runs.claim import Claim
from app.task import Adapters, FileParts, LowRank, Task

DCP = ".metadata"
IN_FOLDERS = (
    *(run_folder.MODEL, run_folder.MODEL_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *(DCP, f"pytorch_model_fsdp_0/{DCP}", "pytorch_model_fsdp.bin"),
)
"""Files of weights in the folder of a finished run, of transformers, of DCP, and of Accelerate's `save_state`."""
_COMPARED = 1 << 20
"""Elements that are compared at a time."""


def in_folder(folder: Path) -> Path | None:
    """Return the file with the weights of a folder, or the index of several, if it has one."""
    found = next((folder / name for name in IN_FOLDERS if (folder / name).exists()), None)
    return found or foreign_weights.in_deepspeed(folder) or foreign_weights.in_deepspeed(folder / "pytorch_model")


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


def file_names(task: Task, model: torch.nn.Module) -> Mapping[str, FileParts]:
    """Return `task.file_names` of a model that is not prepared."""
    return task.file_names(model, {name: it.shape for name, it in model_tensors.local_pieces(model).items()})


def joined(stored: StoredWeights, task: Task, model: torch.nn.Module) -> StoredWeights:
    """Return stored tensors by the model's names, with the parts of each tensor joined (`Task.file_names`).

    The shape of a joined tensor is the model's, or shows the shape of a part that does not fit.
    """
    found, pieces = dict(stored), model_tensors.local_pieces(model)
    for name, parts in file_names(task, model).items():
        if name not in stored and parts.keys() <= stored.keys():
            tensors = [found.pop(part) for part in parts]
            wrong = [it.shape for it, shape in zip(tensors, parts.values(), strict=True) if it.shape != shape]
            shape = (len(parts), *wrong[0]) if wrong else pieces[name].shape
            found[name] = StoredTensor(shape, tensors[0].dtype, partial(_read_parts, tensors))
    return found


def _read_parts(tensors: Sequence[StoredTensor], values: torch.Tensor, wanted: Region) -> None:
    """Fill `values` as `StoredTensor.read_into`, from consecutive parts of the flattened tensor."""
    start = 0
    for tensor in tensors:
        own = Region.flat(start, prod(tensor.shape))
        start += own.count
        for both in own.overlaps(wanted):
            part = values.new_empty(both.count)
            tensor.read_into(part, own.inside(both))
            place = wanted.inside(both)
            place.rows(values).copy_(part.view(place.runs, place.run))


def word(dtype: torch.dtype) -> str:
    """Return a type as people write it."""
    return str(dtype).removeprefix("torch.")


def open_stored(place: Path) -> StoredWeights:
    """Return the tensors of a file, of an index of files, or of a checkpoint. Raises CheckpointError if it cannot be read."""
    if place.is_dir():
        return _open_checkpoint(place)
    if place.name == DCP:
        return foreign_weights.open_dcp(place)
    if place.name.endswith("_states.pt"):
        return foreign_weights.open_deepspeed(place)
    return _open_index(place) if place.name.endswith(".index.json") else _open_file(place)


def _open_file(path: Path) -> StoredWeights:
    with disk_errors(path, "read"), path.open("rb") as opened:
        begin = opened.read(9)
    is_safetensors = begin[8:] == b"{" and begin[5:8] == bytes(3)  # after the size of its header, which can be 128, too
    if begin.startswith((b"PK", b"\x80")) and not is_safetensors:  # a zip archive, as torch.save writes it, or a bare pickle
        return foreign_weights.open_pickle(path)
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


def _open_checkpoint(folder: Path) -> StoredWeights:
    reader = step_folders.Reader(folder)
    key = reader.finished_key()

    def read_into(name: str, shape: tuple[int, ...], values: torch.Tensor, region: Region) -> None:
        reader.read_into(Piece(key, name, shape, region, values))

    return {
        name: StoredTensor(it.shape, torch_dtype(it.dtype), partial(read_into, name, it.shape))
        for name, it in reader.tensors(key).items()
    } | {name: foreign_weights.in_memory(buffer) for name, buffer in reader.buffers().items()}


# ---- Adapters: small matrices that are added to a weight for files of plain weights. Only they are whole in memory -----------


def for_files(contents: Mapping[str, Content], task: Task, model: torch.nn.Module) -> dict[str, Content]:
    """Return the weights of a model, prepared or not, by their names in files. Each can be read once, and in this order."""
    plain = merged(contents, task.adapters(model))
    names = task.file_names(model, {name: it.shape for name, it in plain.items()})
    found = dict[str, Content]()
    for name, content in plain.items():
        found |= _split(content, names[name]) if name in names else {name: content}
    return found


def _split(content: Content, parts: FileParts) -> dict[str, Content]:
    """Return consecutive parts of a tensor, which must be read in order."""
    chunks, rest = iter(content.chunks), memoryview(b"")

    def taken(size_bytes: int) -> Iterator[memoryview]:
        nonlocal rest
        while size_bytes:
            rest = rest or memoryview(next(chunks))
            piece, rest = rest[:size_bytes], rest[size_bytes:]
            size_bytes -= len(piece)
            yield piece

    sized = {name: Content(content.dtype, shape, ()) for name, shape in parts.items()}
    return {name: replace(it, chunks=taken(tensor_file.size_bytes(it))) for name, it in sized.items()}


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
        fill(model, joined(open_stored(path), task, model))
    except CheckpointError as error:
        raise RunFolderError(f"{path} does not contain the weights of the model described in {about}: {error}") from error
    if described.get("task_digest", "none") != tasks.digest(str(values["task"])):
        note = f"note: {values['task']}, or a file it imports, has changed since {run_dir} was trained\n"
        sys.stderr.write(printable(note))
    return task, model.eval(), facts
