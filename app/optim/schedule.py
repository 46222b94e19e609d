"""Length of a run, and learning rate of each of its steps: functions of the recipe and the size of the data alone.

No scheduler object and no state: step `k` has the same rate on any number of processes and after any resume.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.errors import DataError, RecipeError
from app.recipe import optimizers
from app.recipe.schema import MOST_STEPS, OptimRecipe, TrainRecipe

_DEFAULT_EPOCHS = 10


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
    warmup_steps = _warmup_steps(optim, steps_per_epoch=length.steps_per_epoch)
    if warmup_steps > length.total_steps:
        notes.append(
            f"the warm-up has {warmup_steps:,} steps and the run has {length.total_steps:,}: the learning "
            "rate never reaches its peak (optim.warmup_steps, optim.warmup_epochs)"
        )
    return notes


def total_steps(train: TrainRecipe, *, steps_per_epoch: int) -> int:
    """Return the optimizer steps of a whole run."""
    if train.steps is not None:
        return train.steps
    return steps_per_epoch * (_DEFAULT_EPOCHS if train.epochs is None else train.epochs)


def first_step_by_length(optim: OptimRecipe, *, steps_per_epoch: int) -> int | None:
    """Return the first step (from 0) whose learning rate depends on how long the run is; None: no step's does."""
    if optim.schedule != "cosine" or optim.final_lr_ratio == 1 or optim.cosine_steps is not None:
        return None
    return _warmup_steps(optim, steps_per_epoch=steps_per_epoch) + 1  # its first step has the peak, whatever comes later


def lr_at(step: int, *, optim: OptimRecipe, global_batch_size: int, steps_per_epoch: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0).

    A linear rise to the peak over the warm-up, then the recipe's schedule. The cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983, without restarts) has its final value from step `optim.cosine_steps` on. Without that it would reach it at
    step `total_steps`, so that no step is spent at 0.
    Epochs are counted from the start of the run, warm-up included, as in Goyal et al. 2017 (arXiv:1706.02677).
    """
    peak = optim.lr
    if optim.lr_reference_batch is not None:  # proportional to the global batch (Goyal et al. 2017, section 2.1)
        peak = optim.lr * global_batch_size / optim.lr_reference_batch
    warmup_steps = _warmup_steps(optim, steps_per_epoch=steps_per_epoch)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if optim.schedule == "cosine":
        end = total_steps if optim.cosine_steps is None else optim.cosine_steps
        progress = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
        share = (1 + math.cos(math.pi * progress)) / 2
        return peak * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * share)
    if optim.schedule == "step":
        return peak * optim.decay_factor ** sum(step >= round(epoch * steps_per_epoch) for epoch in optim.decay_epochs)
    return peak


def _warmup_steps(optim: OptimRecipe, *, steps_per_epoch: int) -> int:
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return round((optim.warmup_epochs or 0) * steps_per_epoch)
