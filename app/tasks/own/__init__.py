"""A user's own task: one file, with a recipe next to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.recipe import task_file
from app.runs.model_card import CardFacts


def describe(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> CardFacts:
    """Return what the model card contains: without running the file, only its name is known."""
    name = task_file.name_of(recipe["task"])
    return CardFacts(
        title=f"A model of {name}",
        data=f"the data of the task `{name}`",
        also=f"The task's file, `{name}`, must be where `recipe.yaml` says; otherwise give its place: "
        f'`stored_weights.load(Path(...), "PLACE/{name}")`. The facts of its samples: `{dict(facts)}`.\n',
    )
