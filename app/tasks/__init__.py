"""The tasks: those that come with the package, each in its own folder, and users' own files.

Nothing is imported here before it is asked for: the launcher reads the keys of a recipe, and a task may need torch.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

SHIPPED = {"image_classification": "app.tasks.image_classification", "causal_lm": "app.tasks.causal_lm"}
"""The package of each. Its module `sections` has the class `Sections` (standard library only: it is read on login nodes), its
module `task` the class `task`, which is made from them."""

WITH_FOLDERS = ("causal_lm",)
"""Tasks with `export_files`: their model is a folder for another library. The export of all others needs no torch."""

WITHOUT_PARTS = ("image_classification",)
"""Tasks whose models tensor parallelism cannot split."""

DEFAULT = "image_classification"
"""Default task if the recipe names none."""


def of(recipe: Any) -> Any:
    """Return the recipe's task, an `app.task.Task`. Raises RecipeError if it is a file of the user's that is no task."""
    if recipe.task in SHIPPED:
        return importlib.import_module(f"{SHIPPED[recipe.task]}.task").task(recipe.sections)
    return importlib.import_module("app.tasks.own.own_task").task_of(recipe)


def card(task: str, facts: Any, recipe: Any) -> Any:
    """Return the task's part of a model card, an `app.runs.model_card.CardFacts`. Needs no torch and runs no user's file."""
    return importlib.import_module(f"{SHIPPED[task]}.card" if task in SHIPPED else "app.tasks.own").describe(facts, recipe)


def sources(task: str) -> dict[str, str]:
    """Return the texts of a user's task file and of what it imported from its folder, by name; none of a shipped task."""
    return {} if task in SHIPPED else importlib.import_module("app.tasks.own.own_task").sources(task)


def digest(task: str) -> str:
    """Return a hash of what `sources` returns, of 16 hexadecimal digits; `none` for a task that comes with the package."""
    texts = sources(task)
    if not texts:
        return "none"
    return hashlib.blake2b("\0".join(part for item in texts.items() for part in item).encode(), digest_size=8).hexdigest()
