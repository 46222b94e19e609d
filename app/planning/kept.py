"""What was planned of a recipe, kept for this user with what can be made again: for the launcher, which has no torch to plan
with. Standard library only.

Kept by what decides the memory of a recipe: its network, batch, optimizer and types; not by where its data lies or how long it
trains. Where nothing can be written or read, nothing was planned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from app.files.own_folder import cache_folder
from app.recipe import recipe_keys as keys
from app.recipe.schema import Recipe

ORDER = ("single", "ddp", "zero1", "zero2", "hsdp", "fsdp2", "zero3", "tensor_parallel", "zero3_offload")
"""From the least that is divided, and sent, to the most; what waits for the host's memory is last."""
_FORMAT = 2
_OF_TRAINING = ("train.global_batch_size", "train.dtype", "train.ema_decay", "train.freeze", "train.sync_batchnorm")
_OF_OPTIMIZER = ("optim.name", "optim.settings")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A way of running a recipe, and what it takes of each device."""

    strategy: str
    """`Case.strategy`."""
    data_ranks: int
    replicas: int
    tensor_parallel: int
    precision: str
    checkpoint_activations: str
    preset: str
    always: int
    """Bytes of weights, gradients and optimizer state: without them there is no training, whatever the batch."""
    totals: tuple[tuple[int, int], ...]
    """By rising micro-batch: its samples, and the bytes at the peak of a step."""
    host: int = 0
    """Bytes of the host's memory that each process takes for what is offloaded, whatever the batch."""

    def total(self, micro_batch: int) -> int:
        """Return the bytes at the peak, between and beyond those that were planned by straight lines."""
        points = ((0, self.always), *self.totals)
        above = next((place for place, (size, _) in enumerate(points) if size >= micro_batch), len(points) - 1)
        (low, least), (high, most) = points[max(above, 1) - 1], points[max(above, 1)]
        return round(least + (most - least) * (micro_batch - low) / (high - low))

    @property
    def _case(self) -> tuple[object, ...]:
        return (
            self.strategy,
            self.data_ranks,
            self.replicas,
            self.tensor_parallel,
            self.precision,
            self.checkpoint_activations,
        )


@dataclass(frozen=True)
class KeptPlan:
    """What is kept for a recipe."""

    parameters: int
    ways: tuple[Kept, ...]

    def find(self, wanted: Kept) -> Kept | None:
        """Return what was planned for the same case, whatever `wanted` says of its memory."""
        return next((way for way in self.ways if way._case == wanted._case), None)


def key_of(recipe: Recipe) -> str:
    """Return the name under which a recipe's plan is kept: a digest of what decides its memory."""
    places = keys.places(recipe.task)
    own = set(keys.of_task(recipe.task))
    values = {
        key: value
        for key, value in keys.flat(recipe).items()
        if key not in places and (key.partition(".")[0] in own or key in (*_OF_TRAINING, *_OF_OPTIMIZER, "task"))
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read(recipe: Recipe, environment: Mapping[str, str]) -> KeptPlan | None:
    """Return what is kept for a recipe, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(_file(recipe, environment).read_text())
        if content["format"] == _FORMAT:
            ways = ({**way, "totals": tuple(map(tuple, way["totals"]))} for way in content["ways"])
            return KeptPlan(content["parameters"], tuple(Kept(**way) for way in ways))
    return None


def write(recipe: Recipe, environment: Mapping[str, str], parameters: int, ways: Iterable[Kept]) -> None:
    """Keep what was planned; of what was kept before, what is of other cases stays. Does nothing where it cannot."""
    before = read(recipe, environment)
    of_all = {way._case: way for way in (*(before.ways if before else ()), *ways)}
    content = {"format": _FORMAT, "parameters": parameters, "ways": [asdict(way) for way in of_all.values()]}
    with suppress(OSError):
        file = _file(recipe, environment)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.replace(file)


def _file(recipe: Recipe, environment: Mapping[str, str]) -> Path:
    return cache_folder("plans", environment) / f"{key_of(recipe)}.json"
