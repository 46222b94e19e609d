"""Beginning with the weights of another run or of a file (`--init-from`), as for fine-tuning: weights and buffers, no more.

Every tensor of the model has to be there in its shape, and no other: a network that is half another's trains without a
word. Only one layer, the head, which says how many classes there are for instance, may be missing or of another shape; then it
stays new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from app.checkpoints import checkpoint
from app.checkpoints import step_folders as files
from app.checkpoints.durable import telling
from app.checkpoints.piece import Piece
from app.checkpoints.tensor_file import TensorFile
from app.errors import CheckpointError
from app.ranks import handshake
from app.ranks.runtime import Runtime
from app.record import run_folder

Shape = tuple[int, ...]

_MOST_NAMED = 8


@dataclass(frozen=True)
class Initial:
    """What a run begins with instead of the weights of its seed."""

    place: Path
    """A safetensors file, or a checkpoint."""


@dataclass(frozen=True)
class _Stored:
    """Tensors on disk, by their plain names."""

    shapes: Mapping[str, Shape]
    read_into: Callable[[str, torch.Tensor], None]
    """Fills `values`, 1-D, with the tensor of a name, in their dtype."""


def take_up(
    runtime: Runtime, model: torch.nn.Module, init_from: str | None, *, head: str, resumed: Path | None
) -> Initial | None:
    """Give the model, plain on the CPU of every rank, the weights that --init-from names; None: it names none.

    It is a file, a checkpoint or a run folder: then the weights that the run left, or those of its newest checkpoint, which
    are the averaged ones if it has them. The layer `head` alone may be another one. A run that goes on from a checkpoint,
    `resumed`, passes them over. Raises, on all ranks, CheckpointError if they cannot be read or do not fit, and TopologyError
    if ranks read different ones.
    """
    if init_from is None:
        return None
    if resumed is not None:
        _say(runtime, f"--init-from {init_from} is passed over: the run goes on from {resumed}")
        return None
    place = _find(runtime, Path(init_from))
    with runtime.together():
        stored = _of_checkpoint(place) if place.is_dir() else _of_file(place)
        said = _load(model, stored, place, head)
    handshake.check_agreement(runtime.gather, runtime.device, {"initial weights": handshake.weights_digest(model)})
    _say(runtime, said)
    return Initial(place)


def _say(runtime: Runtime, sentence: str) -> None:
    if runtime.is_main:
        print(sentence, flush=True)  # noqa: T201 - the user must know


def _find(runtime: Runtime, place: Path) -> Path:
    """Return the file, or the checkpoint, which all ranks have found whole, that is meant."""
    left = place / run_folder.MODEL
    file = runtime.from_main(left if left.exists() else place if place.is_file() else None)
    found: Path | None = file or checkpoint.find(runtime, place)
    if found is None:
        raise CheckpointError(
            f"--init-from is {place}: give a safetensors file, a checkpoint, or a run folder with a {run_folder.MODEL} or a "
            "checkpoint. That is none of them."
        )
    return found


def _of_file(path: Path) -> _Stored:
    with telling(path, "read"), path.open("rb") as opened:
        begin = opened.read(4)
    if begin.startswith((b"PK", b"\x80")):  # a zip archive, as torch.save writes it, or a bare pickle
        convert = "save_file(torch.load(PATH, weights_only=True), NEW), with save_file of safetensors.torch"
        raise CheckpointError(
            f"--init-from is {path}, a pickle of torch.save, and a safetensors file is wanted: {convert}, makes one"
        )
    file = TensorFile(path)
    return _Stored(file.shapes, file.read_into)


def _of_checkpoint(folder: Path) -> _Stored:
    reader = files.Reader(folder)
    key, buffers = reader.finished_key(), reader.buffers()
    shapes = reader.shapes(key)

    def read_into(name: str, values: torch.Tensor) -> None:
        if name in buffers:
            values.copy_(buffers[name].view(-1))
        else:
            reader.read_into(Piece(key, name, shapes[name], 0, values))

    return _Stored(shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}, read_into)


@torch.no_grad()
def _load(model: torch.nn.Module, stored: _Stored, place: Path, head: str) -> str:
    """Fill the model and return the sentence that says with what. Raises CheckpointError, naming all that does not fit."""
    tensors = model.state_dict()
    shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = [name for name in {**shapes, **stored.shapes} if shapes.get(name) != stored.shapes.get(name)]
    wrong = [_difference(name, stored.shapes, shapes) for name in differing if _layer(name) != head]
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the weights of {place} are of another model: {'; '.join(wrong[:_MOST_NAMED])}{more}. Only the last layer, "
            f"{head}, may differ: give the recipe that model (model.*, data.*), or choose other weights."
        )
    for name, tensor in tensors.items():
        if not differing or _layer(name) != head:
            stored.read_into(name, tensor.view(-1))
    said = f"the weights to begin with are those of {place}"
    if differing:
        how = "; ".join(_difference(name, stored.shapes, shapes) for name in differing)
        said += f", but the last layer, {head}, is new, because it is of another shape ({how})"
    return said


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _difference(name: str, there: Mapping[str, Shape], here: Mapping[str, Shape]) -> str:
    if name not in here:
        return f"{name} is not in this run's"
    return f"{name} is {there[name]} there and {here[name]} here" if name in there else f"{name} is not there"
