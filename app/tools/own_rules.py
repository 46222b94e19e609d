"""The rules of a task that one process can check by itself, on one batch.

Losses are compared in evaluation mode: dropout is off and batch normalization uses what it has stored, so that a difference is
the loss's own. float32 rounds the mean of some losses by less than 1e-6, and a broken rule moves it by far more than 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.data.draws import Draws
from app.data.loader import Failure, Fetching
from app.data.samples import Batch
from app.errors import DataError
from app.feed import samples_of
from app.recipe.schema import Recipe
from app.task import Form, Loss, Task
from app.tools.seen import Prints, prints_of

TOLERANCE = 1e-5
"""Largest relative difference of two losses that are to be the same."""
FETCH, READY, CALLS, LOSS, COUNT = "fetch", "ready", "one call", "loss", "count"
DRAW = "Take random numbers from `draw`, and nothing from torch's, NumPy's or Python's generators or from one of your own."

Broken = list[tuple[str, str]]
"""Rules that are broken, and a sentence for each."""


@contextmanager
def calls_of(model: nn.Module) -> Iterator[list[str]]:
    """Return the block in which calls of the model are noted by "", and those of its parts past it by their names."""
    noted: list[str] = []
    inside: list[nn.Module] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: None if inside else noted.append(name)

    hooks = [
        part.register_forward_pre_hook(note(name))
        for name, part in model.named_modules()
        if not name or next(part.parameters(), None) is not None
    ]
    hooks.append(model.register_forward_pre_hook(lambda *_: inside.append(model)))
    hooks.append(model.register_forward_hook(lambda *_: inside.clear()))
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def broken(recipe: Recipe, task: Task, samples: Any, model: nn.Module, *, form: Form, device: torch.device) -> Broken:
    """Return the rules that a batch of the first step's samples shows to be broken, the first one of each kind.

    `model` is not prepared; it is brought to the device. Raises DataError if a sample cannot be read.
    """
    batch = Fetching(samples, seed=recipe.seed).__getitems__(samples_of(recipe, len(samples), 0))
    if isinstance(batch, Failure):
        raise DataError(batch.text)
    prints = prints_of(_made_ready(recipe, task, batch, form, device))
    if found := first_difference(prints, prints_of(_made_ready(recipe, task, batch, form, device))):
        name, number = found
        said = f"{name} of sample {number} changes when the same process makes the same batch ready again"
        why = "`ready` depends on something other than its arguments (global random state, its own generator, earlier calls)"
        return [(READY, f"{said}: {why}. {DRAW}")]
    was_training = model.training
    model.to(device).eval()
    try:
        return _of_losses(task, model, lambda: _made_ready(recipe, task, batch, form, device), recipe.sections.neighbours)
    finally:
        model.train(was_training)


def first_difference(one: Prints, other: Prints) -> tuple[str, int] | None:
    """Return the name of a field, and the number of a sample that both have, in which they differ; None: in nothing."""
    for number in sorted(one.keys() & other.keys()):
        for name in sorted(one[number].keys() | other[number].keys()):
            mine, theirs = one[number].get(name), other[number].get(name)
            if mine is None or theirs is None or not mine.is_like(theirs):
                return name, number
    return None


def _made_ready(recipe: Recipe, task: Task, batch: Batch, form: Form, device: torch.device) -> Batch:
    copied: Batch = {name: value.clone().to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    ready = task.ready(copied, Draws(recipe.seed, copied["samples"], copied["numbers"]), form)
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in ready.items()}


def _of_losses(task: Task, model: nn.Module, batch: Callable[[], Batch], neighbours: int) -> Broken:
    with calls_of(model) as called:
        whole = task.loss(model, batch())
    if called != [""]:
        return [(CALLS, _of_calls(called))]
    size = len(batch()["samples"])
    half = size // 2 // neighbours * neighbours
    if _far(_total(whole), _total(task.loss(model, batch()))):
        said = "the loss of the same batch differs the second time, in evaluation mode"
        return [(LOSS, f"{said}: `loss` or the model draws random numbers, or keeps state between passes. {DRAW}")]
    if half in (0, size):
        return []
    return of_halves(whole, *(task.loss(model, part_of(batch(), part)) for part in (slice(half), slice(half, None))))


def _of_calls(called: Sequence[str]) -> str:
    parts = ", ".join(dict.fromkeys(filter(None, called)))
    what = f"calls {parts} of the model directly" if parts else f"calls the model {len(called)} times"
    return (
        f"`loss` {what}: it must call model(...) exactly once, and none of its parts. Outside that call FSDP2 and ZeRO "
        "have only shards of the weights, and DDP sees no other call. Do everything that needs weights in `forward`."
    )


def part_of(batch: Batch, part: slice) -> Batch:
    """Return these samples of a batch: the rows of what has one for each."""
    size = len(batch["samples"])
    return {name: value[part] if hasattr(value, "__len__") and _rows(value) == size else value for name, value in batch.items()}


def _rows(value: Any) -> int | None:
    return len(value) if isinstance(value, (Tensor, np.ndarray)) and value.ndim else None


def of_halves(whole: Loss, *parts: Loss) -> Broken:
    """Return what is wrong if a batch's loss is not that of its parts together."""
    counts, count = [float(part.count) for part in parts], float(whole.count)
    if _far(count, sum(counts)):
        said = f"Loss.count of a batch is {count:g}, and those of its halves add up to {sum(counts):g}"
        return [(COUNT, f"{said}: it must be what the mean is over, such as a number of samples or tokens")]
    total = sum(map(_total, parts))
    if not _far(_total(whole), total):
        return []
    means, mean = [float(part.mean.detach()) for part in parts], float(whole.mean.detach())
    said = f"the loss of a batch is {mean:.7g}, and the mean of its halves, weighed by Loss.count, {total / max(count, 1):.7g}"
    room = TOLERANCE * max(map(abs, means))
    if min(means) - room <= mean <= max(means) + room:
        why = (
            f"Loss.mean is not the mean over what Loss.count says ({count:g}): it is a mean of means, or a mean over something "
            "else. Return Loss.of(sum, count), of the sum of all losses and of how many they are"
        )
    else:
        why = (
            "the loss of a sample depends on other samples of its pass (beyond `neighbours`), and those change with the "
            "number of processes. A loss over the batch, such as a contrastive one, cannot give the same run"
        )
    return [(LOSS, f"{said}: {why}")]


def _total(loss: Loss) -> float:
    return float(loss.mean.detach()) * float(loss.count)


def _far(one: float, other: float) -> bool:
    return not abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
