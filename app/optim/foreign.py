"""Optimizer classes that are not torch's: imported by their path in the recipe, and called with the recipe's settings.

Python finds the module as usual: in an installed package, on PYTHONPATH, or next to the user's task file. Only processes that
train import it. `app/checkpoints/optimizer_trial.py` finds out where the class may step.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from app.errors import RecipeError
from app.recipe.schema import OptimRecipe


def imported(name: str) -> type[torch.optim.Optimizer]:
    """Return the class with this path. Raises RecipeError for a path that leads to no optimizer."""
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module raises
        raise RecipeError(
            f"optim.name is {name}, and {module} cannot be imported ({type(error).__name__}: {error}): install its package in "
            "the environment of this run, or put the file next to your task file"
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise RecipeError(
            f"optim.name is {name}, but {module} has no subclass of torch.optim.Optimizer of that name: correct it"
        )
    return kind


def arguments(kind: type, recipe: OptimRecipe) -> dict[str, Any]:
    """Return what the class is called with: the settings and the learning rate. Raises RecipeError for keys it does not take.

    A recipe has floats only: whole numbers become ints again, unless the default is a float.
    """
    taken = inspect.signature(kind).parameters
    decays = [recipe.weight_decay, *(group.get("weight_decay", 0.0) for group in (recipe.groups or {}).values())]
    for key in ("lr", "weight_decay") if any(decays) else ("lr",):
        if key not in taken and all(it.kind is not inspect.Parameter.VAR_KEYWORD for it in taken.values()):
            raise RecipeError(f"optim.{key} is set, which {recipe.name} does not take: it takes {', '.join(taken)}")

    def as_taken(value: Any, default: Any) -> Any:
        if isinstance(value, list):
            return tuple(as_taken(it, None) for it in value)
        return int(value) if isinstance(value, float) and value.is_integer() and not isinstance(default, float) else value

    settings = recipe.settings or {}
    return {"lr": recipe.lr} | {name: as_taken(it, getattr(taken.get(name), "default", None)) for name, it in settings.items()}


def has_modes(optimizer: Any) -> bool:
    """Return True if the weights to evaluate are others than those to train, as `train()` and `eval()` exchange them.

    Schedule-free optimizers have them (arXiv:2405.15682; github.com/facebookresearch/schedule_free).
    """
    return hasattr(optimizer, "train") and hasattr(optimizer, "eval")
