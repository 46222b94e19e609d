"""The keys that a task brings: a recipe of another task has others."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from app import tasks
from app.errors import RecipeError
from app.recipe import recipe_file, recipe_keys
from app.recipe.recipe_file import load
from app.recipe.schema import Recipe


@pytest.mark.parametrize("task", tasks.SHIPPED)
def test_every_shipped_task_has_sections_of_its_own(task: str) -> None:
    own = {field.name for field in fields(recipe_keys.sections_of(task))}
    assert own
    assert own.isdisjoint(field.name for field in fields(Recipe))
    assert all(recipe_keys.meanings(task)[key] for key in {*recipe_keys.kinds(task), *own})
    assert recipe_keys.not_learnt(task) | recipe_keys.places(task) < recipe_keys.kinds(task).keys()
    assert tasks.DEFAULT in tasks.SHIPPED
    # Python 3.10 refuses a ClassVar without a type in `typing.get_type_hints`.
    classes = recipe_keys.sections(task).values()
    assert [cls.__name__ for cls in classes if "ClassVar" in cls.__annotations__.values()] == []


@pytest.mark.parametrize("overrides", [["model.layers=4"], ["task=causal_lm", "model.layers=4"]])
def test_the_file_or_the_command_line_names_the_task(tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  heads: 2\n" + ("" if "task=causal_lm" in overrides else "task: causal_lm\n"))  # at any place
    loaded = load(str(file), overrides)
    assert (loaded.recipe.task, loaded.recipe.sections.model.layers, loaded.recipe.sections.model.heads) == ("causal_lm", 4, 2)
    again = tmp_path / "again.yaml"
    again.write_text(recipe_file.render(loaded))
    assert load(str(again)).recipe == loaded.recipe


def test_a_task_has_no_keys_of_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("task: causal_lm\naugment:\n  flip: 1\nmodel:\n  head: 3\n  layer: 1\noptim:\n  lr: -1\n")
    with pytest.raises(RecipeError) as raised:
        load(str(file), ["model.dropout=1"])
    first, *others = [problem.replace(str(file), "mine.yaml") for problem in raised.value.problems]
    assert first.startswith("augment (mine.yaml:2): there is no such key; a recipe has seed, task, data, model, train, optim, ")
    assert others == [
        "model.layer (mine.yaml:6): there is no such key; did you mean model.layers?",
        "model.head is 3 (mine.yaml:5): expected one of auto, whole, chunked",
        "model.dropout is 1.0: it must be at least 0 and less than 1 (command line)",
        "optim.lr is -1.0: it must be at least 0 (mine.yaml:8)",
    ]
