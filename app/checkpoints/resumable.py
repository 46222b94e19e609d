"""Whether a run may resume from a checkpoint: everything that affects training is unchanged, and steps are left.

The rest, such as the number of epochs or the logging, may change. Where a longer or shorter run has other learning rates, that
is said.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.checkpoints import step_folders
from app.errors import CheckpointError
from app.optim import schedule
from app.optim.schedule import Length
from app.recipe import recipe_file, recipe_keys, task_file
from app.recipe.schema import Recipe, TrainRecipe

_LENGTH = frozenset({"train.epochs", "train.steps", "train.stop_after_evaluations_without_gain"})
_LOOKED_AT = frozenset({"train.evaluate_every_epochs", "train.evaluate_every_steps", "train.max_validation_samples"})
"""They decide when a run ends that stops early, and nothing else of what is learnt."""
_MOST_KEYS = 5
"""That a refusal names."""
_MOST_LINES = 40
"""Of a difference that it shows."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    step: int
    """Steps that were taken before it."""
    note: str | None
    """What another length of the run does to the learning rates that are left, if anything."""


def check_same_run(
    folder: Path,
    recipe: Recipe,
    data: Mapping[str, str],
    length: Length,
    *,
    sources: Mapping[str, str],
    may_differ: bool = False,
) -> Resumed:
    """Check that a run of this recipe and length, over data with these facts, may resume from the checkpoint in `folder`.

    `sources` are the texts of the user's task file and of what belongs to it, which may differ only if
    that is said. Raises CheckpointError, naming all that differs, if the checkpoint is of another run or another version of
    this program, and if it is past the end of this run.
    """
    state = step_folders.Reader(folder).state
    _check_version(folder, state["recipe"], recipe)
    differing = [*_differing_keys(state["recipe"], recipe), *_differing_data(state["data"], data)]
    if differing:
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join(differing)}. Undo these changes, or start a new run "
            "in another --run-dir."
        )
    if not may_differ:
        _check_sources(folder, state.get("task_sources", {}), sources)
    step: int = state["step"]
    if step > length.total_steps:
        raise CheckpointError(
            f"{folder} is at step {step}, and this run has {length.total_steps} steps "
            f"({_length_key(recipe.train)}): no step is left. Give train.steps={step} or more, or --resume from an "
            "earlier checkpoint with another --run-dir."
        )
    before = replace(recipe.train, epochs=state["recipe"]["train.epochs"], steps=state["recipe"]["train.steps"])
    return Resumed(folder, step, _other_rates(recipe, before, length, step))


def _check_version(folder: Path, before: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise CheckpointError if the program that wrote the checkpoint had other keys for what decides what is learnt."""
    now = recipe_file.flat(recipe)
    if task_file.name_of(before.get("task", recipe.task)) != task_file.name_of(recipe.task):
        return  # which has other keys anyway
    unshared = sorted((before.keys() ^ now.keys()) - recipe_keys.not_learnt(recipe.task))
    if unshared:
        names = ", ".join(unshared[:_MOST_KEYS]) + (", ..." if len(unshared) > _MOST_KEYS else "")
        raise CheckpointError(
            f"{folder} was written by another version of Samerun: only one of the two has the recipe keys {names}. Finish the "
            "run with that version, or start a new run in another --run-dir."
        )


def _check_sources(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise CheckpointError with the difference if the task's files are not what they were."""
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not changed:
        return
    lines = [
        line
        for name in changed
        for line in difflib.unified_diff(
            before.get(name, "").splitlines(),
            now.get(name, "").splitlines(),
            f"{name} (then)",
            f"{name} (now)",
            lineterm="",
            n=1,
        )
    ]
    more = [f"... and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    raise CheckpointError(
        (
            f"{folder} belongs to a run with another version of the task: {', '.join(changed)} changed since. "
            "Undo the change, start a new run in another --run-dir, or give --changed-task if the change does "
            "not affect training.\n"
        )
        + "\n".join([*lines[:_MOST_LINES], *more])
    )


def _differing_keys(before: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Say of each key that decides what is learnt how it differs from a checkpoint's. How long, and where, may change."""
    now = recipe_file.flat(recipe)
    may_change = recipe_keys.not_learnt(recipe.task) | recipe_keys.places(recipe.task) | _LENGTH
    if None not in (before.get("train.stop_after_evaluations_without_gain"), recipe.train.stop_after_evaluations_without_gain):
        may_change -= _LOOKED_AT
    shared = [key for key in now if key in before and key not in may_change]
    # Where a task's file lies may change; what it says is compared elsewhere.
    then = {**before, "task": task_file.name_of(before.get("task", ""))}
    at_present = {**now, "task": task_file.name_of(recipe.task)}
    # As JSON, in which the order of parameter groups counts.
    differing = [key for key in shared if json.dumps(then[key]) != json.dumps(at_present[key])]
    return [f"{key} was {before[key]!r} and is {now[key]!r}" for key in differing]


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
        f"the run is {length.total_steps:,} steps long ({_length_key(recipe.train)}) instead of "
        f"{steps_before:,} ({_length_key(before)}): under optim.schedule={recipe.optim.schedule} this changes "
        f"all learning rates from step {max(step, first) + 1:,} on, where it is {now:.4g} instead of {was:.4g}"
    )


def _length_key(train: TrainRecipe) -> str:
    if train.steps is not None:
        return f"train.steps={train.steps}"
    return "the default number of epochs" if train.epochs is None else f"train.epochs={train.epochs}"
