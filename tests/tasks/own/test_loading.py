"""A user's task file where it runs: what is imported, from where, and what a run says of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app import tasks
from app.errors import RecipeError
from app.recipe.recipe_file import load

LINE = """
from dataclasses import dataclass

import helper_of_line
import torch
from torch import nn

from app.task import Loss, Samples, Scores


@dataclass(frozen=True)
class Model:
    width: int = 16

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"model.width is {self.width}: it must be 1 or more")


@dataclass(frozen=True)
class Sections:
    model: Model = Model()


class Line:
    def __init__(self, sections):
        self.width = sections.model.width

    def samples(self, split):
        inputs = torch.randn(128, 4, generator=torch.Generator().manual_seed(len(split)))
        return Samples.of({"x": inputs, "y": inputs.sum(1, keepdim=True)}) if split != "validation" else None

    def model(self, metadata):
        return nn.Sequential(nn.Linear(4, self.width), nn.GELU(), nn.Linear(self.width, 1))

    def loss(self, model, batch):
        return Loss.of((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))


task = Line
"""


@pytest.fixture
def recipe(tmp_path: Path, own_imports: None) -> Path:
    (tmp_path / "line.py").write_text(LINE)
    (tmp_path / "helper_of_line.py").write_text("WORD = 1\n")
    (tmp_path / "line.yaml").write_text("task: line.py\ntrain: {global_batch_size: 16, steps: 6}\nlog: {every_steps: 1}\n")
    return tmp_path / "line.yaml"


def test_the_file_is_imported_under_its_own_name_and_its_folder_goes_last(recipe: Path) -> None:
    task = tasks.of(load(str(recipe), ["model.width=3"]).recipe)
    assert task.of_user.width == 3
    assert sys.path[-1] == str(recipe.parent)
    assert tasks.sources(str(recipe.parent / "line.py")) == {"helper_of_line.py": "WORD = 1\n", "line.py": LINE}
    assert tasks.of(load(str(recipe)).recipe).of_user.width == 16


def test_what_the_sections_refuse_is_a_refusal_of_the_recipe(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"^model\.width is 0: it must be 1 or more \(says line\.py\)$"):
        tasks.of(load(str(recipe), ["model.width=0"]).recipe)


@pytest.mark.parametrize("name", ["json.py", "my-line.py"])
def test_a_name_that_another_module_has_or_none_can_have_is_refused(recipe: Path, name: str) -> None:
    shutil.copy(recipe.parent / "line.py", recipe.parent / name)
    with pytest.raises(RecipeError, match=r"Give the file another name, such as my_"):
        tasks.of(load(str(recipe), [f"task={recipe.parent / name}"]).recipe)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("task = Line\n", "task = Line(Sections())\n", "task in line.py is a Line, but must be a class: write task = Line"),
        ("(self, sections)", "(self)", "Line in line.py takes (), but is called as Line(sections): the file has a class"),
        ("class Sections", "class Other", "Line in line.py takes (sections), but is called as Line(): the file has no class"),
    ],
)
def test_what_makes_no_task_is_refused_in_a_sentence(recipe: Path, before: str, after: str, said: str) -> None:
    (recipe.parent / "line.py").write_text(LINE.replace(before, after))
    with pytest.raises(RecipeError, match=re.escape(said)):
        tasks.of(load(str(recipe)).recipe)


def test_a_package_of_the_user_that_has_a_name_of_ours_is_named(recipe: Path) -> None:
    (recipe.parent / "app").mkdir()
    (recipe.parent / "line.py").write_text(f"from app.networks import Net\n{LINE}")
    with pytest.raises(RecipeError, match=r"line.py imports app.networks, but .*: give yours another name, such as my_"):
        tasks.of(load(str(recipe)).recipe)


def test_code_of_a_run_folder_is_not_run(recipe: Path) -> None:
    hostile = recipe.parent / "run"
    hostile.mkdir()
    (hostile / "run.json").write_text("{}")
    (hostile / "line.py").write_text("raise SystemExit('run')\ntask = int\n")
    with pytest.raises(RecipeError, match=r"is in the run folder .*: code in a run folder is never executed"):
        tasks.of(load(str(recipe), [f"task={hostile / 'line.py'}"]).recipe)


def ran(*words: str, check: bool = True) -> str:
    command = [sys.executable, "-m", "launch.cli", *words] if words[0] == "launch" else [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_run_of_it_goes_on_unless_the_file_was_changed_and_the_weights_outlive_a_move(recipe: Path) -> None:
    run, folder = recipe.parent / "run", recipe.parent
    start = ["launch", "--recipe", str(recipe), "--run-dir", str(run), "--trackers", "none"]
    ran(*start, "--preset", "multi_gpu", "--processes", "2", "train.steps=4", "checkpoint.every_steps=2")
    told = json.loads((run / "run.json").read_text())
    assert (told["task"], len(told["task_digest"])) == (str(folder / "line.py"), 16)
    (folder / "helper_of_line.py").write_text("WORD = 2\n")
    goes_on = [*start, "--preset", "cpu", "checkpoint.every_steps=2"]
    refused = ran(*goes_on, check=False)
    assert "with another version of the task: helper_of_line.py changed since" in refused
    (run / "result.json").unlink(missing_ok=True)
    assert "resumed from" in ran(*goes_on, "--changed-task")
    moved = folder / "elsewhere"
    moved.mkdir()
    for name in ("line.py", "helper_of_line.py"):
        (folder / name).rename(moved / name)
    assert "line.py: it cannot be read" in ran("app.evaluate", str(run), check=False)
    assert "loss" in ran("app.evaluate", str(run), f"task={moved / 'line.py'}")
