"""The keys that a task brings: a recipe of another task has others."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from app import tasks
from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.recipe_file import load
from app.recipe.schema import Recipe


@pytest.mark.parametrize("task", tasks.SHIPPED)
def test_every_shipped_task_has_sections_of_its_own(task: str) -> None:
    own = {field.name for field in fields(recipe_file.sections_of(task))}
    assert own
    assert own.isdisjoint(field.name for field in fields(Recipe))
    assert all(recipe_file.meanings(task)[key] for key in {*recipe_file.kinds(task), *own})
    assert recipe_file.not_learnt(task) | recipe_file.places(task) < recipe_file.kinds(task).keys()


@pytest.mark.parametrize("overrides", [["model.layers=4"], ["task=causal_lm", "model.layers=4"]])
def test_the_file_or_the_command_line_names_the_task(tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  heads: 2\n" + ("" if "task=causal_lm" in overrides else "task: causal_lm\n"))  # at any place
    recipe = load(str(file), overrides).recipe
    assert (recipe.task, recipe.sections.model.layers, recipe.sections.model.heads) == ("causal_lm", 4, 2)


def test_a_task_has_no_keys_of_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("task: causal_lm\naugment:\n  flip: 1\n")
    with pytest.raises(
        RecipeError, match=r"yaml:2\): there is no such key; a recipe has seed, task, data, model, train, optim, "
    ):
        load(str(file))
