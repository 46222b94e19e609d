"""Starts a run from given weights (`train.init_from`), for fine-tuning: loads weights and buffers only.

The file must have every tensor of the model in its shape, and no others: a model with half of its weights would train without
an error. Only the last layer, the head, whose shape can depend on the number of classes, and the names in `train.init_allow`
can be missing or of another shape; they stay new. The run prints which tensors were taken, are new or were left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from pathlib import Path
from urllib.parse import urlparse

import torch

from app.checkpoints import checkpoint, stored_weights
from app.checkpoints.stored_weights import IN_FOLDERS
from app.checkpoints.tensor_file import StoredWeights
from app.distributed import handshake
from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import CheckpointError, RecipeError, did_you_mean
from app.files import hub, text_files
from app.init import model_tensors
from app.init.region import Region
from app.optim import parameter_groups
from app.recipe.schema import PUBLISHED, TrainRecipe
from app.task import Adapters, Task

_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.(?:weight|bias|running_mean|running_var))")
_ELEMENTS = 1 << 20
"""Elements that are read at a time, to be hashed."""
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that torch.compile, FSDP and activation checkpointing add."""


def load(runtime: Runtime, task: Task, model: torch.nn.Module, recipe: TrainRecipe, *, resumed: Path | None) -> str | None:
    """Load the weights of `init_from`, if there is one, into the model before it is prepared, and return their place or name.

    It is a file, a checkpoint or a run folder: then the weights that the run wrote, or those of its newest checkpoint, which
    are the averaged ones if it has them. A run that resumes from a checkpoint, `resumed`, does not read them. Raises, on all
    ranks, CheckpointError if they cannot be read or do not fit, RecipeError for a pattern of `init_allow` that matches nothing,
    and TopologyError if ranks read different weights.
    """
    if recipe.init_from is None:
        return None
    if resumed is not None:
        if runtime.is_main:
            print(f"train.init_from is ignored, because the run resumes from {resumed}", flush=True)  # noqa: T201
        return None
    is_published = recipe.init_from.startswith(PUBLISHED)
    if is_published or hub.parsed(recipe.init_from):
        name = recipe.init_from
        with runtime.together():
            if runtime.launched.local_rank == 0:  # one process of each node downloads
                _fetched(name, download=recipe.download)
        with runtime.together():
            place = _fetched(name, download=False)
    else:
        with runtime.together():
            source = Path(text_files.filled_in("train.init_from", recipe.init_from))
            file = source if source.is_file() else stored_weights.in_folder(source)
        found = runtime.from_main(file) or checkpoint.find(runtime, source)
        if found is None:
            raise CheckpointError(
                f"train.init_from is {source}, which is not a source of weights: give a safetensors or .pth file, "
                f"a checkpoint, or a folder that contains one, a {' or '.join(IN_FOLDERS[:2])}, or weights of DCP or DeepSpeed."
            )
        place, name = found, str(found)
    with runtime.together():
        stored = stored_weights.open_stored(place)
        if is_published:
            stored = {name_here(name): it for name, it in stored.items()}
        adapters = task.adapters(model)
        allow = (*(recipe.init_allow or ()), *(adapters.alone if adapters else ()))
        summary, read = _load(model, task, stored, adapters, name, allow)
    weights = {"initial weights": model_tensors.digest(model, runtime.gather)}
    if model_tensors.is_sharded(model):
        weights[f"{name}, as read on this node"] = _node_digest(runtime, read)
    handshake.check_agreement(runtime.gather, runtime.device, weights)
    if runtime.is_main:
        print(summary, flush=True)  # noqa: T201 - the user must know
    return name


def _fetched(name: str, *, download: bool) -> Path:
    """Return the file of published weights, or the file or index of weights of a model of the hub, on this machine."""
    if name.startswith(PUBLISHED):
        return published(name.removeprefix(PUBLISHED), download=download)
    folder = hub.folder("train.init_from", name, weights=True, download=download)
    return stored_weights.in_folder(folder) or folder


@torch.no_grad()
def _load(
    model: torch.nn.Module, task: Task, stored: StoredWeights, adapters: Adapters | None, place: str, allow: Sequence[str]
) -> tuple[str, StoredWeights]:
    """Fill the model and return a summary, and the tensors that were read, by the model's names.

    Raises CheckpointError with all names that do not fit.
    """
    stored_names, head = stored.keys(), task.head(model)
    in_files = chain(*stored_weights.file_names(task, model).values())
    known = {*model.state_dict(keep_vars=True), *(adapters.names.values() if adapters else ()), *in_files}
    stored = stored_weights.joined(_by_model_names(model, known, stored), task, model)
    if adapters:
        here = {there: name for name, there in adapters.names.items()}
        stored = {here.get(name, name): it for name, it in stored.items()}
    tensors = stored_weights.named(model, stored)
    names = [*tensors, *stored]
    for pattern in allow:
        if not any(fnmatchcase(name, pattern) for name in (*names, *stored_names)):
            near = parameter_groups.near(pattern, list(dict.fromkeys((*names, *stored_names))))
            raise RecipeError(f"train.init_allow has {pattern!r}, which matches no weight in the model or the file: {near}")
    free = {name for name in names if _layer(name) == head or any(fnmatchcase(name, pattern) for pattern in allow)}
    differing = stored_weights.differences(tensors, stored)
    wrong = stored_weights.contradictions(tensors, stored) or {it: text for it, text in differing.items() if it not in free}
    if wrong:
        raise CheckpointError(
            f"the weights of {place} belong to another model: {listed([*wrong.values()])}. Only "
            f"the last layer, {head}, and the names in train.init_allow may differ: describe that model in "
            "the recipe (model.*, data.*), or choose other weights."
        )
    layers = {_layer(name) for name in differing}
    taken = {name: it for name, it in tensors.items() if not (name in free and _layer(name) in layers)}
    for name, tensor in taken.items():
        stored[name].read_into(tensor.values, tensor.region)
    parts = [f"{len(taken)} tensors taken"]
    for (there, kind), count in Counter((stored[name].dtype, it.values.dtype) for name, it in taken.items()).items():
        if there != kind:
            parts.append(f"{count} of them converted from {stored_weights.word(there)} to {stored_weights.word(kind)}")
    # A layer with a tensor that does not fit stays new as a whole.
    if new := [differing.get(name, name) for name in tensors if name not in taken]:
        parts.append(f"{len(new)} initialized from the seed: {listed(new)}")
    if left_out := [name for name in stored if name not in tensors]:
        parts.append(f"{len(left_out)} left out: {listed(left_out)}")
    return f"initial weights from {place}: {'; '.join(parts)}", {name: stored[name] for name in taken}


@torch.no_grad()
def _node_digest(runtime: Runtime, read: StoredWeights) -> str:
    """Return a digest of all read tensors, which this node's ranks read again in shares: no rank keeps all of them."""
    launched, total = runtime.launched, 0
    ranks = launched.local_world_size
    for name, it in read.items() if ranks < launched.world_size else ():
        first, end = (prod(it.shape) * rank // ranks for rank in (launched.local_rank, launched.local_rank + 1))
        for start in range(first, end, _ELEMENTS):
            values = torch.empty(min(_ELEMENTS, end - start))
            region = Region.flat(start, values.numel())
            it.read_into(values, region)
            total += model_tensors.digest_of(name, values, region)
    node = launched.rank // ranks
    return model_tensors.as_text(sum(value for its, value in runtime.gather((node, total)) if its == node))


def _by_model_names(model: torch.nn.Module, known: Set[str], stored: StoredWeights) -> StoredWeights:
    """Return stored tensors by the `known` names of the model, without buffers that it does not need.

    Removes the prefix that makes the most names known, such as the name of a Lightning module's attribute, and adds the prefix
    of a base model, which transformers leaves out of a file with a base model alone.
    """
    names = {_WRAPPERS.sub("", name): it for name, it in stored.items()}
    base = f"{getattr(model, 'base_model_prefix', '')}."
    ends = known | {name.removeprefix(base) for name in known}
    prefixes = Counter(name[:at] for name in names for at in _component_starts(name) if name[at:] in ends)
    prefix = min(prefixes, key=lambda it: (-prefixes[it], len(it)), default="")
    # A name that the file has twice, with the prefix and without, keeps it, and is refused as one that the model does not have.
    names = {name if (end := name.removeprefix(prefix)) in names else end: it for name, it in names.items()}
    whole = {name: f"{base}{name}" for name in names.keys() - known if f"{base}{name}" in known - names.keys()}
    found = {whole.get(name, name): it for name, it in names.items()}
    unneeded = model_tensors.unneeded_names(model, found.keys() - known)
    return {name: it for name, it in found.items() if name not in unneeded}


def _component_starts(name: str) -> list[int]:
    return [0, *(it.end() for it in re.finditer(r"\.", name))]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


# ---- Weights that torchvision publishes, by the names of its enums: from torch.hub's cache, or downloaded into it ---------


def published(name: str, *, download: bool) -> Path:
    """Return the file of the weights `name`, such as ResNet50_Weights.IMAGENET1K_V2.

    Raises CheckpointError if torchvision has no such weights, and as `cached`.
    """
    from torchvision import models  # takes seconds

    try:
        url: str = models.get_weight(name).url
    except (ValueError, KeyError):
        known = [str(it) for weights in map(models.get_model_weights, models.list_models()) for it in weights]
        hint = did_you_mean(name, known, otherwise="its documentation lists them")
        raise CheckpointError(f"train.init_from is torchvision:{name}: torchvision here has no such weights; {hint}") from None
    return cached(url, download=download)


def cached(url: str, *, download: bool) -> Path:
    """Return torch.hub's file of a URL (TORCH_HOME), and download it first if it does not exist and `download` is set.

    A download must have the SHA-256 that its name contains. An existing file is trusted, as by torch.hub.
    Raises CheckpointError if the file does not exist, and is not or cannot be downloaded.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    if path.exists():
        return path
    if not download:
        raise CheckpointError(
            f"{path}, the published weights of train.init_from, does not exist, and downloads are off: set "
            f"train.download=true, or save {url} there"
        )
    digest = torch.hub.HASH_REGEX.search(path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digest[1] if digest else None, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: another digest
        raise CheckpointError(f"{url} cannot be downloaded to {path}: {error}. Try again, or save the file there") from error
    return path


def name_here(name: str) -> str:
    """Return the present name of a tensor in a published file: the names of densenets are older."""
    return "".join(found.groups()) if (found := _DENSENET.fullmatch(name)) else name
