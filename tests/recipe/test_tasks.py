"""The keys that a task brings: a recipe of another task has others, and the application asks its sections what it must know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from app import tasks
from app.errors import RecipeError
from app.recipe import recipe_file, recipe_keys
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import load
from app.recipe.schema import Recipe

WORDS = '''
from dataclasses import dataclass, field
from typing import ClassVar

from app.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """What is read."""

    not_learnt: ClassVar[tuple[str, ...]] = ("cache",)
    places: ClassVar[tuple[str, ...]] = ("folder",)

    folder: str = "books"
    """Where it lies."""
    cache: str | None = None
    """Where copies of it
    are kept."""
    length: int = 8
    """Words in a sample."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    why_grouped: ClassVar[str] = "four samples make a page"
    group_size: ClassVar[int] = 4
    text: TextRecipe = field(default_factory=TextRecipe)

    def __post_init__(self):
        if self.text.length < 1:
            raise RecipeError(f"text.length is {self.text.length}: it must be at least 1")
'''


@pytest.fixture
def words(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A task of that name, whose section is `text`."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "task_of_words").mkdir()
    (folder / "task_of_words" / "sections.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(tasks.SHIPPED, "words", "task_of_words")
    yield "words"
    monkeypatch.undo()
    for module in ("task_of_words", "task_of_words.sections"):
        sys.modules.pop(module, None)
    for cached in (recipe_keys.sections, recipe_keys.kinds, recipe_keys.not_learnt, recipe_keys.places, recipe_keys._parsed):
        cached.cache_clear()


def test_every_shipped_task_has_sections_of_its_own() -> None:
    assert tasks.DEFAULT in tasks.SHIPPED
    for task in tasks.SHIPPED:
        own = {field.name for field in fields(recipe_keys.sections_of(task))}
        assert own
        assert own.isdisjoint(field.name for field in fields(Recipe))
        assert recipe_keys.meanings(task).keys() >= {*recipe_keys.kinds(task), *own}
        assert recipe_keys.not_learnt(task) | recipe_keys.places(task) < recipe_keys.kinds(task).keys()


@pytest.mark.parametrize("overrides", [["text.length=4"], ["task=words", "text.length=4"]])
def test_the_file_or_the_command_line_names_the_task(words: str, tmp_path: Path, overrides: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("text:\n  folder: poems\n" + ("" if "task=words" in overrides else "task: words\n"))  # wherever it stands
    loaded = load(str(file), overrides)
    assert (loaded.recipe.task, loaded.recipe.sections.text.length, loaded.recipe.sections.text.folder) == (words, 4, "poems")
    again = tmp_path / "again.yaml"
    again.write_text(recipe_file.render(loaded))
    assert load(str(again)).recipe == loaded.recipe
    assert recipe_file.as_dict(loaded.recipe)["text"] == {"folder": "poems", "cache": None, "length": 4}


def test_a_task_has_no_keys_of_another(words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"task: {words}\ndata:\n  path: x\ntext:\n  lenght: 3\noptim:\n  lr: -1\n")
    with pytest.raises(RecipeError) as raised:
        load(str(file), ["text.length=0"])
    assert [problem.replace(str(file), "mine.yaml") for problem in raised.value.problems] == [
        "data (mine.yaml:2): there is no such key; a recipe has seed, task, text, train, optim, log, checkpoint, profile",
        "text.lenght (mine.yaml:5): there is no such key; did you mean text.length?",
        "text.length is 0: it must be at least 1 (command line)",
        "optim.lr is -1.0: it must be at least 0 (mine.yaml:7)",
    ]
    with pytest.raises(RecipeError, match=r"text\.length \(command line\): there is no such key"):
        load("digits", ["text.length=3"])


def test_the_sections_say_what_is_not_learnt_and_which_samples_belong_together(words: str) -> None:
    def recipe(**values: object) -> Recipe:
        return recipe_keys.build({"task": words} | {key.replace("_", "."): value for key, value in values.items()})

    assert recipe_file.digest(recipe(text_cache="x")) == recipe_file.digest(recipe())
    assert len({recipe_file.digest(it) for it in (recipe(), recipe(text_length=4), recipe(text_folder="x"), Recipe())}) == 4
    assert recipe_keys.places(words) == {"text.folder", "train.init_from"}
    assert "text.cache=null  (text or null)\n      Where copies of it are kept." in recipe_file.reference(words)
    assert BatchPlan.of(recipe(), 16).micro_batch == 8
    with pytest.raises(RecipeError, match=r"a multiple of 4 \(four samples make a page\): use 4, 8, 16, 32 processes"):
        BatchPlan.of(recipe(), 64)
    with pytest.raises(RecipeError, match="is 126: it must be a multiple of 4, because four samples make a page"):
        recipe_keys.build({"task": words, "train.global_batch_size": 126})


@pytest.mark.parametrize("task", list(tasks.SHIPPED))
def test_python_3_10_can_read_the_types_of_the_keys(task: str) -> None:
    """There `typing.get_type_hints` refuses a ClassVar that does not say of what."""
    classes = recipe_keys.sections(task).values()
    assert [cls.__name__ for cls in classes if "ClassVar" in cls.__annotations__.values()] == []
