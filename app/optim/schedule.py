"""Length of a run, and learning rate of each of its steps: functions of the recipe and the size of the data alone.

No scheduler object and no state: step `k` has the same rate on any number of processes and after any resume.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from app.errors import DataError, RecipeError
from app.recipe import optimizers
from app.recipe.schema import MOST_STEPS, OptimRecipe, TrainRecipe

_DEFAULT_EPOCHS = 10
_DECAY = 0.2
"""Share of a wsd schedule that is its decay: as good as a cosine in Hagele et al. 2024 (arXiv:2405.18392)."""
_TIMESCALE = 10_000
"""Steps after which an inverse_sqrt schedule without warm-up has 1/sqrt(2) of the peak, as in transformers."""
_ENDING = ("final_lr_ratio", "schedule_steps")
USED_KEYS: Mapping[str, tuple[str, ...]] = {
    "cosine": _ENDING,
    "linear": _ENDING,
    "wsd": (*_ENDING, "decay_steps", "decay_type"),
    "inverse_sqrt": (),
    "polynomial": (*_ENDING, "power"),
    "step": ("decay_epochs", "decay_factor"),
    "constant": (),
}
"""Keys of `optim` that each `optim.schedule` uses; all use the warm-up."""
KEYS = ("schedule", "warmup_epochs", "warmup_steps", *sorted({key for keys in USED_KEYS.values() for key in keys}))
"""Keys of `optim` that only decide how the rate of a step follows from its peak."""


@dataclass(frozen=True)
class Length:
    """The length of a run."""

    steps_per_epoch: int
    """Optimizer steps in one pass over the training data; an incomplete last global batch is dropped."""
    total_steps: int
    """Optimizer steps in the whole run."""


def length_in_steps(train: TrainRecipe, *, dataset_size: int, global_batch_size: int) -> Length:
    """Return the length of a run over `dataset_size` training samples in global batches of `global_batch_size` samples.

    Raises DataError if there are fewer samples than one global batch holds, and RecipeError for epochs of too many steps and
    for steps to skip that are not in the run, or are all of it.
    """
    steps_per_epoch = dataset_size // global_batch_size
    if steps_per_epoch == 0:
        raise DataError(
            f"the training data has {dataset_size:,} sample{'s' if dataset_size > 1 else ''} and a global batch has "
            f"{global_batch_size:,}: that is less than one step. Lower train.global_batch_size to {dataset_size} or less, or "
            "give more training samples."
        )
    length = Length(steps_per_epoch, total_steps(train, steps_per_epoch=steps_per_epoch))
    if length.total_steps > MOST_STEPS:
        raise RecipeError(f"train.epochs is {train.epochs}, or {length.total_steps:,} steps: give at most {MOST_STEPS:,}.")
    spans, steps = [[*span] for span in train.skip_steps or ()], length.total_steps
    if spans and spans[-1][1] > steps + 1:
        raise RecipeError(f"train.skip_steps is {spans}, and the run has {steps:,} steps: skip only steps of the run.")
    if sum(end - first for first, end in spans) == steps:
        raise RecipeError(f"train.skip_steps is {spans}, all {steps:,} steps of the run: leave some to train.")
    return length


def notes_on(optim: OptimRecipe, length: Length) -> list[str]:
    """Return notes for the user about the optimizer and its learning rates, a sentence each."""
    notes = optimizers.notes_on(optim)
    unused = {*KEYS[3:]} - {*USED_KEYS[optim.schedule]}
    notes += [
        f"optim.{it.name} is {getattr(optim, it.name)}, which optim.schedule={optim.schedule} does not use"
        for it in fields(optim)
        if it.name in unused and getattr(optim, it.name) != it.default
    ]
    warmup_steps = _warmup_steps(optim, steps_per_epoch=length.steps_per_epoch)
    if warmup_steps > length.total_steps:
        notes.append(
            f"the warm-up has {warmup_steps:,} steps and the run has {length.total_steps:,}: the learning "
            "rate never reaches its peak (optim.warmup_steps, optim.warmup_epochs)"
        )
    room = (optim.schedule_steps or length.total_steps) - warmup_steps
    if optim.schedule == "wsd" and (optim.decay_steps or 0) > room:
        notes.append(
            f"optim.decay_steps is {optim.decay_steps:,}, and {max(0, room):,} steps are left after the warm-up: the decay "
            "begins at its end"
        )
    return notes


def total_steps(train: TrainRecipe, *, steps_per_epoch: int) -> int:
    """Return the optimizer steps of a whole run."""
    if train.steps is not None:
        return train.steps
    return steps_per_epoch * (_DEFAULT_EPOCHS if train.epochs is None else train.epochs)


def first_difference(one: Callable[[int], float], other: Callable[[int], float], *, steps: int) -> int | None:
    """Return the first of so many steps (from 0) at which two runs have different learning rates; None: no step.

    All are compared, in about 4 microseconds each: a step takes longer to train.
    """
    return next((step for step in range(steps) if one(step) != other(step)), None)


def lr_at(step: int, *, optim: OptimRecipe, global_batch_size: int, steps_per_epoch: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0).

    A linear rise to the peak over the warm-up, then the recipe's schedule. Those with an end have their final value from step
    `optim.schedule_steps` on. Without that they would reach it at step `total_steps`, so that no step is spent at 0.

    The cosine is of Loshchilov and Hutter 2017 (arXiv:1608.03983), without restarts; wsd of Hu et al. 2024 (arXiv:2404.06395),
    with the sqrt decay of Hagele et al. 2024 (arXiv:2405.18392); the inverse square root of Vaswani et al. 2017
    (arXiv:1706.03762, equation 3), scaled to the peak. transformers' schedulers have the same rates after the warm-up, in which
    theirs are a step behind: their first step has the rate 0.

    Epochs are counted from the start of the run, warm-up included, as in Goyal et al. 2017 (arXiv:1706.02677).
    """
    peak = optim.lr
    if optim.lr_reference_batch is not None:  # proportional to the global batch (Goyal et al. 2017, section 2.1)
        peak = optim.lr * global_batch_size / optim.lr_reference_batch
    warmup_steps = _warmup_steps(optim, steps_per_epoch=steps_per_epoch)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "step":
        return peak * optim.decay_factor ** sum(step >= round(epoch * steps_per_epoch) for epoch in optim.decay_epochs)
    if optim.schedule == "inverse_sqrt":
        timescale = warmup_steps or _TIMESCALE
        return peak / math.sqrt((step + timescale - warmup_steps) / timescale)
    start, end = warmup_steps, optim.schedule_steps or total_steps
    if optim.schedule == "wsd":
        start = max(start, end - (optim.decay_steps or round(end * _DECAY)))
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    shape = optim.decay_type if optim.schedule == "wsd" else optim.schedule
    if shape == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        share = 1 - math.sqrt(progress) if shape == "sqrt" else (1 - progress) ** (optim.power if shape == "polynomial" else 1)
    return peak * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * share)


def _warmup_steps(optim: OptimRecipe, *, steps_per_epoch: int) -> int:
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return round((optim.warmup_epochs or 0) * steps_per_epoch)
