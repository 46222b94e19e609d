"""Whether a run may go on from a checkpoint: what decides what is learnt is as it was, and the run is not over before it.

The rest, such as the number of epochs or the logging, may change. Where a longer or shorter run has other learning rates, that
is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.checkpoints import step_folders
from app.errors import CheckpointError
from app.optim import schedule
from app.optim.schedule import Length
from app.recipe import recipe_file
from app.recipe.schema import Recipe, TrainRecipe

# Beside what is not learnt at all: how long, and where the same data lies.
_MAY_CHANGE = (*recipe_file.NOT_LEARNT, "train.epochs", "train.steps", "data.path")

_AS_BEFORE: Mapping[str, Any] = {
    "data.color": "auto",
    "data.hub_config": None,
    "data.hub_revision": None,
    "data.jpeg_decoder": "libjpeg",
    "train.max_gradient_spike": None,
    "train.tf32": False,
}
"""The value, as JSON has it, with which a key that came later does what the program did before it had that key.

A key that decides what is learnt and is not here refuses every checkpoint that was written before it came.
"""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from."""

    folder: Path
    step: int
    """Steps that were taken before it."""
    note: str | None
    """What another length of the run does to the learning rates that are left, if anything."""


def check_same_run(folder: Path, recipe: Recipe, data: Mapping[str, str], length: Length) -> Resumed:
    """Check that a run of this recipe, of this length over data of these facts, may go on from the checkpoint in `folder`.

    Raises CheckpointError, naming all that differs, if it is of another run, and if it is past the end of this one.
    """
    state = step_folders.Reader(folder).state
    differing = [*_differing_keys(state["recipe"], recipe), *_differing_data(state["data"], data)]
    if differing:
        raise CheckpointError(
            f"{folder} is of another run: {'; '.join(differing)}. Take these back, or train from the start in another "
            "--run-dir."
        )
    step: int = state["step"]
    if step > length.total_steps:
        raise CheckpointError(
            f"{folder} has {step} steps done, and this run is to have {length.total_steps} ({_length_key(recipe.train)}): no "
            f"step is left to take, and none is taken back. Give train.steps={step} or more, or --resume with an earlier "
            "checkpoint and another --run-dir."
        )
    before = replace(recipe.train, epochs=state["recipe"]["train.epochs"], steps=state["recipe"]["train.steps"])
    return Resumed(folder, step, _other_rates(recipe, before, length, step))


def _differing_keys(before: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Say of each key that decides what is learnt how it differs from a checkpoint's."""
    flat = recipe_file.flat(recipe)
    now = {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()}  # as JSON has it
    found = []
    for key in dict.fromkeys([*before, *now]):
        if key.startswith(_MAY_CHANGE):
            continue
        if key not in before:
            found += _newer_key(key, now[key])
        elif key not in now:
            found.append(f"{key} was {before[key]!r}, and this version of Samerun has no such key")
        elif before[key] != now[key]:
            found.append(f"{key} was {before[key]!r} and is {now[key]!r}")
    return found


def _newer_key(key: str, value: Any) -> list[str]:
    """Say what a key asks for that the program which wrote the checkpoint did not do."""
    unknown = f"{key} is {value!r}, and the version of Samerun that wrote the checkpoint did not have that key"
    if key not in _AS_BEFORE:
        return [f"{unknown}, and no value of it is the same as none"]
    as_before = _AS_BEFORE[key]
    return [] if value == as_before else [f"{unknown}: {key}={'null' if as_before is None else as_before} is what it did"]


def _differing_data(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    different = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return [f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in different]


def _other_rates(recipe: Recipe, before: TrainRecipe, length: Length, step: int) -> str | None:
    """Say what the length of the run, where it was that of `before`, does to the learning rates after so many steps."""
    steps_before = schedule.total_steps(before, steps_per_epoch=length.steps_per_epoch)
    first = schedule.first_step_by_length(recipe.optim, steps_per_epoch=length.steps_per_epoch)
    if steps_before == length.total_steps or first is None or max(step, first) >= length.total_steps:
        return None
    was, now = (
        schedule.lr_at(
            max(step, first),
            optim=recipe.optim,
            global_batch_size=recipe.train.global_batch_size,
            steps_per_epoch=length.steps_per_epoch,
            total_steps=total_steps,
        )
        for total_steps in (steps_before, length.total_steps)
    )
    return (
        f"the run is {length.total_steps:,} steps long now ({_length_key(recipe.train)}) and was {steps_before:,} "
        f"({_length_key(before)}): under optim.schedule={recipe.optim.schedule} that moves every learning rate from step "
        f"{max(step, first) + 1:,} on, where it is {now:.4g} and would have been {was:.4g}"
    )


def _length_key(train: TrainRecipe) -> str:
    if train.steps is not None:
        return f"train.steps={train.steps}"
    return "the default number of epochs" if train.epochs is None else f"train.epochs={train.epochs}"
