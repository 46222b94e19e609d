"""Starts a run from given weights (`train.init_from`), for fine-tuning: loads weights and buffers only.

Every tensor of the model must be there in its shape, and no other: a network that is half another's trains without a
word. Only the last layer, the head, which says how many classes there are for instance, may be missing or of another shape, and
what `train.init_allow` names; that stays new. What was taken, what is new and what was left out is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch

from app.checkpoints import checkpoint, merged, published, stored_weights
from app.checkpoints.stored_weights import IN_FOLDERS, Stored
from app.errors import CheckpointError, RecipeError
from app.files import paths
from app.initial import held
from app.initial.held import Held
from app.initial.region import Region
from app.optim import freezing
from app.ranks import handshake
from app.ranks.runtime import Runtime
from app.recipe.schema import PUBLISHED, TrainRecipe
from app.task import Task

_MOST_NAMED = 8
_ELEMENTS = 1 << 20
"""Read at a time where nothing is kept."""
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that DistributedDataParallel, torch.compile and Lightning add to every name."""


@dataclass(frozen=True)
class Initial:
    """What a run begins with instead of the weights of its seed."""

    place: str
    """A file or a checkpoint, or the name of published weights."""


def take_up(
    runtime: Runtime, task: Task, model: torch.nn.Module, recipe: TrainRecipe, *, resumed: Path | None
) -> Initial | None:
    """Load the weights that `init_from` names into the model, before it is prepared. None: it names none.

    It is a file, a checkpoint or a run folder: then the weights that the run left, or those of its newest checkpoint, which
    are the averaged ones if it has them. The task's `head` may be another one. A run that goes on from a checkpoint, `resumed`,
    does not read them. Raises, on all ranks, CheckpointError if they cannot be read or do not fit, RecipeError for a pattern
    of `init_allow` that matches nothing, and TopologyError if ranks read different ones.
    """
    if recipe.init_from is None:
        return None
    if resumed is not None:
        _say(runtime, f"train.init_from is ignored, because the run resumes from {resumed}")
        return None
    if recipe.init_from.startswith(PUBLISHED):
        name, place = recipe.init_from, _published(runtime, recipe.init_from.removeprefix(PUBLISHED), download=recipe.download)
    else:
        with runtime.together():
            asked = Path(paths.filled_in("train.init_from", recipe.init_from))
        place = _find(runtime, asked)
        name = str(place)
    with runtime.together():
        stored = stored_weights.open_stored(place)
        if recipe.init_from.startswith(PUBLISHED):
            stored = stored.renamed({published.name_here(there): there for there in stored.shapes})
        adapters = merged.adapters_of(task, model)
        allow = (*(recipe.init_allow or ()), *(adapters.alone if adapters else ()))
        said, read = _load(model, merged.as_here(stored, adapters), name, task.head(model), allow)
    weights = {"initial weights": held.digest(model, runtime.gather)}
    if held.is_divided(model):
        weights[f"{name}, as read on this node"] = _digest_of_node(runtime, read)
    handshake.check_agreement(runtime.gather, runtime.device, weights)
    _say(runtime, said)
    return Initial(name)


def _say(runtime: Runtime, sentence: str) -> None:
    if runtime.is_main:
        print(sentence, flush=True)  # noqa: T201 - the user must know


def _published(runtime: Runtime, name: str, *, download: bool) -> Path:
    """Return the file on every rank, after one process of each node has downloaded it there, if it may."""
    with runtime.together():
        if runtime.launched.local_rank == 0:
            published.file_of(name, download=download)
    with runtime.together():
        return published.file_of(name, download=False)


def _find(runtime: Runtime, place: Path) -> Path:
    """Return the file, or the checkpoint, which all ranks have found whole, that is meant."""
    inside = (place / file for file in IN_FOLDERS)
    file = runtime.from_main(place if place.is_file() else next((path for path in inside if path.exists()), None))
    found: Path | None = file or checkpoint.find(runtime, place)
    if found is None:
        raise CheckpointError(
            f"train.init_from is {place}, which is not a source of weights: give a safetensors or .pth file, "
            f"a checkpoint, or a folder that contains one or a {' or '.join(IN_FOLDERS[:2])}."
        )
    return found


@torch.no_grad()
def _load(model: torch.nn.Module, stored: Stored, place: str, head: str, allow: Sequence[str]) -> tuple[str, Stored]:
    """Fill the model and return the sentence that says with what, and what was read, by the model's names.

    Raises CheckpointError, naming all that does not fit.
    """
    kept = held.held(model)
    tensors = {name: kept[name] for name in model.state_dict(keep_vars=True)}
    stored = _without_prefixes(stored, tensors)
    _leave_out_ties(tensors, stored.shapes)
    _check_patterns(allow, [*tensors, *stored.shapes])
    names = list({**tensors, **stored.shapes})
    free = {name for name in names if _layer(name) == head or any(fnmatchcase(name, pattern) for pattern in allow)}
    differing = {name: text for name in names if (text := _difference(name, tensors, stored))}
    wrong = [text for name, text in differing.items() if name not in free]
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the weights of {place} belong to another model: {'; '.join(wrong[:_MOST_NAMED])}{more}. Only "
            f"the last layer, {head}, and the names in train.init_allow may differ: describe that model in "
            "the recipe (model.*, data.*), or choose other weights."
        )
    layers = {_layer(name) for name in differing}
    taken = {name: it for name, it in tensors.items() if not (name in free and _layer(name) in layers)}
    for name, tensor in taken.items():
        stored.read_into(name, tensor.values, tensor.region)
    how = f" ({', '.join(stored.remarks)})" if stored.remarks else ""
    parts = [f"{len(taken)} tensors taken", *_conversions(taken, stored)]
    # A layer that is not there as it must be stays new as a whole.
    if new := [differing.get(name, name) for name in tensors if name not in taken]:
        parts.append(f"{len(new)} initialized from the seed: {_listed(new)}")
    if left := [name for name in stored.shapes if name not in tensors]:
        parts.append(f"{len(left)} left out: {_listed(left)}")
    read = stored.renamed({name: name for name in taken})
    return f"initial weights from {place}{how}: {'; '.join(parts)}", read


@torch.no_grad()
def _digest_of_node(runtime: Runtime, read: Stored) -> str:
    """Return a digest of all that was read, as this node's ranks read it together: none of them keeps all of it."""
    launched, total = runtime.launched, 0
    ranks = launched.local_world_size
    for name, shape in read.shapes.items() if ranks < launched.world_size else ():
        first, end = (prod(shape) * rank // ranks for rank in (launched.local_rank, launched.local_rank + 1))
        for start in range(first, end, _ELEMENTS):
            values = torch.empty(min(_ELEMENTS, end - start))
            region = Region.flat(start, values.numel())
            read.read_into(name, values, region)
            total += held.digest_of(name, values, region)
    node = launched.rank // ranks
    return held.as_text(sum(value for its, value in runtime.gather((node, total)) if its == node))


def _difference(name: str, tensors: Mapping[str, Held], stored: Stored) -> str:
    """Say how what is stored differs from what the model has; nothing: it can be taken."""
    if name not in tensors:
        return f"{name} is not in this run's model"
    if name not in stored.shapes:
        return f"{name} is not in the file"
    (shape, dtype), here = (stored.shapes[name], stored.dtypes[name]), tensors[name]
    if shape != here.shape:
        return f"{name} is {shape} in the file and {here.shape} in the model"
    if isinstance(dtype, torch.dtype) and here.dtype.is_floating_point and not dtype.is_floating_point:
        return f"{name} is {_word(dtype)} in the file and {_word(here.dtype)} in the model"
    return ""


def _without_prefixes(stored: Stored, names: Collection[str]) -> Stored:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in stored.shapes) and not any(name.startswith(prefix) for name in names):
            bare = {name.removeprefix(prefix): name for name in stored.shapes}
            stored = stored.renamed(bare, f"without {prefix!r} before each name")
    return stored


def _leave_out_ties(tensors: dict[str, Held], stored: Collection[str]) -> None:
    """Forget names that are not stored of tensors that have another name which is, as tied embeddings have."""
    there = {id(tensor) for name, tensor in tensors.items() if name in stored}
    for name in [name for name, tensor in tensors.items() if name not in stored and id(tensor) in there]:
        del tensors[name]


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = freezing.near(pattern, list(dict.fromkeys(names)))
            raise RecipeError(f"train.init_allow has {pattern!r}, which matches no weight in the model or the file: {near}")


def _conversions(taken: Mapping[str, Held], stored: Stored) -> list[str]:
    """Say from which types to which others how many tensors were converted."""
    counts = Counter((stored.dtypes[name], tensor.dtype) for name, tensor in taken.items())
    return [
        f"{count} of them converted from {_word(there)} to {_word(here)}"
        for (there, here), count in counts.items()
        if there != here
    ]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_NAMED]) + (f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else "")


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
