"""The keys of a user's task file, as login nodes read them: without running it."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import Refused

from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.recipe_file import load

PLAIN = '''
from dataclasses import dataclass
from typing import ClassVar, Literal

raise SystemExit("this file was run")

@dataclass(frozen=True)
class Table:
    """Where the table is."""

    places: ClassVar[tuple[str, ...]] = ("path",)
    not_learnt = ("cache",)
    path: str | None = None
    """CSV file,
    with a header."""
    cache: bool = False
    columns: tuple[int, ...] = (1, 2)
    ends: tuple[float, float] = (0, 1)
    kind: Literal["a", "b"] | None = None


@dataclass
class Sections:
    table: Table = Table()


class Own:
    group_size = 2


task = Own
'''


def written(folder: Path, text: str, name: str = "own.py") -> Path:
    (folder / name).write_text(text)
    recipe = folder / "mine.yaml"
    recipe.write_text(f"task: {name}\n")
    return recipe


def test_keys_types_defaults_and_meanings_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    loaded = load(str(written(tmp_path, PLAIN)), ["table.columns=3", "table.ends=[1,2.5]", "table.path=/x.csv"])
    table = loaded.recipe.sections.table
    assert (table.path, table.cache, table.columns, table.ends, table.kind) == ("/x.csv", False, (3,), (1.0, 2.5), None)
    assert loaded.recipe.task == str(tmp_path / "own.py")
    assert loaded.recipe.sections.group_size == 2
    assert loaded.recipe.sections.why_grouped == "own.py combines 2 neighbouring samples"
    assert loaded.recipe.sections.inputs == {"table.path": "/x.csv"}
    words = recipe_file.reference(loaded.recipe.task)
    assert "table: Where the table is.\n  table.path=null  (text or null)\n      CSV file, with a header." in words
    assert "table.kind=null  (one of a, b or null)" in words
    assert recipe_file.marked("places", loaded.recipe.task) == {"table.path", "train.init_from"}
    again = tmp_path / "again" / "recipe.yaml"
    again.parent.mkdir()
    again.write_text(recipe_file.render(loaded))  # has the absolute path
    assert load(str(again)).recipe == loaded.recipe


def test_the_digest_is_that_of_the_file_wherever_it_lies(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    digest = recipe_file.digest(load(str(written(here, PLAIN))).recipe)
    assert digest == recipe_file.digest(load(str(written(there, PLAIN)), ["table.cache=true"]).recipe)
    assert digest != recipe_file.digest(load(str(here / "mine.yaml"), ["table.path=x"]).recipe)
    assert digest != recipe_file.digest(load(str(written(there, PLAIN, "other.py"))).recipe)


def test_the_command_line_names_a_file_seen_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text("seed: 3\n")
    written(tmp_path, PLAIN)
    monkeypatch.chdir(tmp_path)
    assert load(str(recipe), ["task=own.py"]).recipe.task == str(tmp_path / "own.py")


REFUSED = {
    "no file": (None, "task is {path}: it cannot be read: No such file or directory (mine.yaml:1)"),
    "no Python": ("class :", "task is {path}: it is not valid Python: invalid syntax"),
    "no task": ("x = 1", "task is {path}: the file must end with `task = MyTask`"),
    "a computed default": (PLAIN.replace("= (1, 2)", "= f()"), "{path}:17: table.columns has no literal default"),
    "a type that no key has": (PLAIN.replace("tuple[int, ...]", "dict"), "{path}:17: table.columns is annotated as dict, and"),
    "a section from elsewhere": (
        PLAIN.replace("table: Table", "table: other.Table"),
        "{path}:24: table of Sections is a other.Table: it must be a dataclass of this file",
    ),
    "a section of the application": (
        PLAIN.replace("table: Table", "optim: Table"),
        "task is {path}: rename optim, a section that every recipe has",
    ),
    "group_size": (PLAIN.replace("group_size = 2", "group_size = 0"), "{path}:28: group_size is 0: it must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_told_with_its_line(tmp_path: Path, text: str | None, sentence: str) -> None:
    recipe = written(tmp_path, text or "")
    if text is None:
        (tmp_path / "own.py").unlink()
    with pytest.raises(RecipeError) as raised:
        load(str(recipe))
    assert str(raised.value).replace(str(recipe), "mine.yaml").startswith(sentence.format(path=tmp_path / "own.py"))


def test_the_launcher_shows_what_it_would_start_without_running_the_file(tmp_path: Path, refused: Refused) -> None:
    recipe = written(tmp_path, PLAIN.replace("group_size = 2", "group_size = 3"))
    command = ["samerun", "launch", "--dry-run", "--preset", "multi_gpu", "--processes", "2", "--recipe", str(recipe)]
    refused(command, "train.global_batch_size is 128: it must be a multiple of 3, because own.py combines 3", 3)
