"""The tasks that come with the package: what can be learnt, each in a folder of its own, by the name that a recipe gives.

Nothing is imported here before it is asked for: the launcher reads the keys of a recipe, and a task may need torch.
"""

from __future__ import annotations

import importlib
from typing import Any

SHIPPED = {"image_classification": "app.tasks.image_classification"}
"""The package of each. Its module `sections` has the class `Sections` (standard library only: it is read on login nodes), its
module `task` the class `task`, which is made from them."""

DEFAULT = "image_classification"
"""Of a recipe that names none."""


def of(recipe: Any) -> Any:
    """Return the recipe's task, an `app.task.Task`."""
    return importlib.import_module(f"{SHIPPED[recipe.task]}.task").task(recipe.sections)
