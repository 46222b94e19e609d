"""Checks that a run can resume from a checkpoint: everything that affects training is unchanged, and steps are left.

The rest, such as the number of epochs or the logging, can change. A note reports if another length changes learning rates.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from app.checkpoints import step_folders
from app.environment.topology import listed
from app.errors import CheckpointError
from app.optim import schedule
from app.optim.schedule import Length
from app.recipe import recipe_file, recipe_keys, task_file
from app.recipe.schema import Recipe, TrainRecipe

_LENGTH = frozenset({"train.epochs", "train.steps", "train.stop_after_evaluations_without_gain"})
_STOPPING = frozenset({"train.evaluate_every_epochs", "train.evaluate_every_steps", "train.max_validation_samples"})
"""Keys that affect training only through early stopping."""
_MOST_KEYS = 5
"""Keys in an error."""
_MOST_LINES = 40
"""Lines of a difference in an error."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    step: int
    """Steps before it."""
    note: str | None
    """The effect of another length of the run on the remaining learning rates, if any."""


def check_same_run(
    folder: Path,
    recipe: Recipe,
    data: Mapping[str, str],
    length: Length,
    *,
    sources: Mapping[str, str],
    may_differ: bool = False,
) -> Resumed:
    """Check that a run of this recipe and length, over data with these facts, can resume from the checkpoint in `folder`.

    `sources` are the texts of the user's task file and of the files it imports, which can differ only if `may_differ` is set.
    Raises CheckpointError with all differences if the checkpoint is of another run or of another version of Samerun, and if it
    is past the end of this run.
    """
    state = step_folders.Reader(folder).state
    before, now = dict(state["recipe"]), dict(recipe_file.flat(recipe))
    for values in (before, now):  # the path of a task file can change; `sources` has its text
        if "task" in values:
            values["task"] = task_file.name_of(values["task"])
    unshared = sorted((before.keys() ^ now.keys()) - recipe_keys.not_learnt(recipe.task))
    if unshared and before.get("task", now["task"]) == now["task"]:  # another task has other keys anyway
        raise CheckpointError(
            f"{folder} was written by another version of Samerun: only one of the two has the recipe keys "
            f"{listed(unshared, _MOST_KEYS)}. Finish the run with that version, or start a new run in another --run-dir."
        )
    may_change = recipe_keys.not_learnt(recipe.task) | recipe_keys.places(recipe.task) | _LENGTH
    if None not in (before.get("train.stop_after_evaluations_without_gain"), recipe.train.stop_after_evaluations_without_gain):
        may_change -= _STOPPING
    differing = [
        f"{key} was {then.get(key)!r} and is {present.get(key)!r}"
        for then, present, keys in (
            (before, now, [key for key in now if key in before and key not in may_change]),
            (state["data"], data, [*dict.fromkeys([*state["data"], *data])]),
        )
        for key in keys
        if json.dumps(then.get(key)) != json.dumps(present.get(key))  # in which the order of parameter groups counts
    ]
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
    train = replace(recipe.train, epochs=before["train.epochs"], steps=before["train.steps"])
    return Resumed(folder, step, _other_rates(recipe, train, length, step))


def _check_sources(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise CheckpointError with the difference if the task's files have changed."""
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not changed:
        return
    lines: list[str] = []
    for name in changed:
        texts = (before.get(name, "").splitlines(), now.get(name, "").splitlines())
        lines += difflib.unified_diff(*texts, f"{name} (then)", f"{name} (now)", lineterm="", n=1)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more lines"]
    raise CheckpointError(
        f"{folder} belongs to a run with another version of the task: {', '.join(changed)} changed since. "
        "Undo the change, start a new run in another --run-dir, or give --changed-task if the change does "
        "not affect training.\n" + "\n".join(lines)
    )


def _other_rates(recipe: Recipe, before: TrainRecipe, length: Length, step: int) -> str | None:
    """Return a note if the length of the run, which was that of `before`, changes the learning rates after this step."""
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
