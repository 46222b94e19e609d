"""A trained model on disk: `model.safetensors` with plain parameter names, and `model.json`, which describes the model.

The weights load into the plain model that the task builds, for example torchvision's, without this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from app import tasks
from app.checkpoints import step_folders, stored_weights, tensor_file
from app.checkpoints.tensor_file import Content
from app.errors import CheckpointError, RecipeError, RunFolderError, printable
from app.init import filling
from app.recipe import recipe_keys, task_file
from app.recipe.schema import Recipe
from app.runs import run_folder
from app.runs.claim import Claim
from app.task import Task


def described(recipe: Recipe, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values that rebuild the model of a finished run, for samples with these facts."""
    own, names = recipe_keys.of_task(recipe.task), [it.name for it in fields(recipe.sections)]
    # What is trained, and not in the file of weights, such as adapters, which are added to the weights.
    gone = {f"{name}.{key}" for name in names for key in getattr(getattr(recipe.sections, name), "not_left", ())}
    values = {key: value for key, value in recipe_keys.flat(recipe).items() if key.partition(".")[0] in own and key not in gone}
    about = {"recipe": {"task": recipe.task, **values}, "facts": dict(facts)}
    return about if recipe.task in tasks.SHIPPED else {**about, "task_digest": tasks.digest(recipe.task)}


def save(
    claim: Claim, description: Mapping[str, Any], weights: Mapping[str, Content], beside: Mapping[str, bytes] | None = None
) -> None:
    """Write the weights (by name) and the result of `described` into the run folder, each whole or not at all.

    `beside` are further files by their names, with which the task's library can load the run folder too.
    Raises CheckpointError or RunFolderError if the disk refuses.
    """
    with claim.staged(run_folder.MODEL) as path:
        tensor_file.write(path, weights, tensor_file.OF_TORCH)
    for name, content in (beside or {}).items():
        claim.write_bytes(name, content)
    claim.write_json(run_folder.MODEL_CONFIG, dict(description))


def load(
    run_dir: Path, task_at: str | None = None, *, built: Callable[[Task, Any], torch.nn.Module] = filling.whole_model
) -> tuple[Task, torch.nn.Module, Mapping[str, Any]]:
    """Return a finished run's task, its trained model, in evaluation mode, and the facts of its samples.

    `run_dir` can be a checkpoint, with adapters apart from frozen weights. `task_at` is the present path of the user's task
    file, if it has moved. Prints a note on stderr if the file has changed. `built` builds the task's model for these facts, by
    default whole and on the CPU; the tensors that it has are read.

    Raises RunFolderError if the run is not finished or one of its files is broken.
    """
    about, path = run_dir / run_folder.MODEL_CONFIG, stored_weights.in_folder(run_dir)
    if step_folders.is_checkpoint(run_dir):
        about, path, state = run_dir / step_folders.STATE, run_dir, step_folders.Reader(run_dir).state
        described = {**state["model"], "recipe": state["recipe"]}
    else:
        described = run_folder.read_json(about)
    if path is None:
        raise RunFolderError(f"{run_dir / run_folder.MODEL} is missing: {run_dir} is not the folder of a finished run.")
    try:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in described["recipe"].items()}
        if task_at is not None:
            values["task"] = task_file.located(task_at, Path())
        elif task_file.is_own(str(values["task"])) and not Path(str(values["task"])).exists():
            raise RunFolderError(
                f"the task file of {run_dir} was {values['task']}, which no longer exists: give its new place "
                "with --task FILE, or task=FILE."
            )
        task, facts = tasks.of(recipe_keys.build(values)), described["facts"]
        model = built(task, facts)
    except (AttributeError, KeyError, TypeError, ValueError, RecipeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RunFolderError(
            f"{about} does not describe the model: {why}. It is damaged, or was written by another version of "
            "Samerun: use that version."
        ) from error
    try:
        stored_weights.fill(model, stored_weights.open_stored(path))
    except CheckpointError as error:
        raise RunFolderError(f"{path} does not contain the weights of the model described in {about}: {error}") from error
    if described.get("task_digest", "none") != tasks.digest(str(values["task"])):
        note = f"note: {values['task']}, or a file it imports, has changed since {run_dir} was trained\n"
        sys.stderr.write(printable(note))
    return task, model.eval(), facts
