"""A trained model on disk: `model.safetensors` with plain parameter names, and `model.json`, which says what it is.

The weights load into the plain model that the task builds, torchvision's of that name for instance; nothing of this package is
needed for that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from app import tasks
from app.checkpoints import tensor_file
from app.errors import RecipeError, RunFolderError
from app.recipe import recipe_keys, task_file
from app.recipe.schema import Recipe
from app.record import run_folder
from app.record.claim import Claim
from app.task import Task


def described(recipe: Recipe, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rebuilds the model of a recipe for samples with these facts, as JSON holds it."""
    own = recipe_keys.of_task(recipe.task)
    values = {key: value for key, value in recipe_keys.flat(recipe).items() if key.partition(".")[0] in own}
    about = {"recipe": {"task": recipe.task, **values}, "facts": dict(facts)}
    return about if recipe.task in tasks.SHIPPED else {**about, "task_digest": tasks.digest(recipe.task)}


def save(claim: Claim, description: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write the weights (name -> tensor) and what `described` returned into the run folder, each whole or not at all.

    Raises CheckpointError or RunFolderError if the disk refuses.
    """
    with claim.staged(run_folder.MODEL) as path:
        tensor_file.write_tensors(path, list(weights.items()), tensor_file.OF_TORCH)
    claim.write_json(run_folder.MODEL_CONFIG, dict(description))


def load(run_dir: Path, task_at: str | None = None) -> tuple[Task, torch.nn.Module, Mapping[str, Any]]:
    """Return a finished run's task, its trained model, in evaluation mode on the CPU, and the facts of its samples.

    `task_at` is where the user's task file lies now; None: where it lay. Says on stderr if it was changed since.

    Raises RunFolderError if the run is not finished or a file of it is broken.
    """
    path, about = run_dir / run_folder.MODEL, run_dir / run_folder.MODEL_CONFIG
    described = run_folder.read_json(about)
    try:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in described["recipe"].items()}
        if task_at is not None:
            values["task"] = task_file.located(task_at, Path())
        elif task_file.is_own(str(values["task"])) and not Path(str(values["task"])).exists():
            raise RunFolderError(
                f"the task file of {run_dir} was {values['task']}, and is not there: give --task FILE, or task=FILE."
            )
        task, facts = tasks.of(recipe_keys.build(values)), described["facts"]
        model = task.model(facts)
    except (AttributeError, KeyError, TypeError, ValueError, RecipeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RunFolderError(
            f"{about} does not say what the model is: {why}. It is broken, or of another version of Samerun, which can read it."
        ) from error
    try:
        weights = load_file(path)
        model.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
        model.load_state_dict(weights)
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {run_dir} is not the folder of a finished run.") from None
    except (OSError, SafetensorError, RuntimeError) as error:
        raise RunFolderError(f"{path} does not hold the weights of the model that {about} describes: {error}") from error
    if described.get("task_digest", "none") != tasks.digest(str(values["task"])):
        sys.stderr.write(f"note: {values['task']}, or a file it imports, is not what {run_dir} was trained with\n")
    return task, model.eval(), facts
