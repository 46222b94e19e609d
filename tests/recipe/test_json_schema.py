"""The JSON Schema of recipes accepts and refuses what the program does, as far as a single key can show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import REPOSITORY

from app.errors import RecipeError
from app.recipe import json_schema, recipe_file
from launch import cli, shipped

Draft7Validator = pytest.importorskip("jsonschema").Draft7Validator  # a machine with a GPU may lack it
TASK = (REPOSITORY / "launch" / "template" / "task.py.template").read_text()
RECIPES = [path for folder in ("app/recipe/shipped", "examples") for path in sorted((REPOSITORY / folder).glob("*.yaml"))]

ACCEPTED = ["seed: 9223372036854775807", "train:", "train: {steps: null, max_micro_batch: auto}",
            "train: {max_micro_batch: 8, skip_steps: [[5, 9], [10, 11]], freeze: head.*}",
            "optim: {lr: 0, betas: [0.9, 0.95], settings: {amsgrad: true}, decay_epochs: 30}",
            "task: causal_lm\nmodel: {hidden_size: 64, heads: 4}", "task: ./task.py\nmodel: {width: 8}"]  # fmt: skip
REFUSED = ["- seed", "seed: -1", "seed: 1.5", "seed: true", "sead: 1", "task: causal", "train: 3", "train: {steps: 0}",
           "train: {batch: 8}", "train: {max_micro_batch: automatic}", "train: {skip_steps: [5, 9]}",
           "train: {skip_steps: [[5, 9, 12]]}", "train: {validation_fraction: 1.0}", "train: {global_batch_size: null}",
           "train: {deterministic: 'yes'}", "optim: {lr: '0.1'}", "optim: {betas: [0.9]}", "optim: {betas: [0.9, 1.5]}",
           "optim: {schedule: cosinus}", "optim: {settings: [1]}", "optim: {decay_epochs: []}", "log: {train_scores: 1}",
           "data: {source: digit}", "model: {hidden_size: 64}", "task: causal_lm\naugment: {flip: 0.5}",
           "task: task.py\nmodel: {width: wide}", "task: task.py\nmodel: {widths: 8}"]  # fmt: skip


class Yaml12(yaml.SafeLoader):
    """YAML as editors read it: 1e-3 is a number."""


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
Yaml12.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def wrong(schema: dict[str, Any], text: str) -> list[str]:
    return [error.message for error in Draft7Validator(schema).iter_errors(yaml.load(text, Yaml12))]


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_each_recipe_of_ours_is_valid(path: Path) -> None:
    assert len(RECIPES) >= 25
    assert wrong(json.loads(json_schema.text(str(path))), path.read_text()) == []


@pytest.mark.parametrize(("text", "is_right"), [*((it, True) for it in ACCEPTED), *((it, False) for it in REFUSED)])
def test_it_agrees_with_the_program(tmp_path: Path, text: str, is_right: bool) -> None:
    task, recipe = tmp_path / "task.py", tmp_path / "recipe.yaml"
    task.write_text(TASK + "raise SystemExit('this file was run')\n")
    recipe.write_text(f"{text}\n")
    assert (wrong(json_schema.schema([str(task)]), text) == []) == is_right
    try:
        recipe_file.load(str(recipe))
        assert is_right
    except RecipeError:
        assert not is_right


def test_a_new_project_and_a_printed_recipe_name_a_schema_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped.new([str(tmp_path / "new")])
    recipe = tmp_path / "new" / "recipe.yaml"
    mark, name = recipe.read_text().splitlines()[0].split("=")
    assert mark == "# yaml-language-server: $schema"
    schema = json.loads((recipe.parent / name).read_text())
    Draft7Validator.check_schema(schema)
    assert wrong(schema, recipe.read_text()) == []
    assert wrong(schema, recipe.read_text().replace("width: 32", "width: wide")) != []
    capsys.readouterr()
    assert cli.main(["recipes", "--schema", str(recipe)]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    assert cli.main(["recipes", "digits"]) == 0
    url = capsys.readouterr().out.splitlines()[0].removeprefix(f"{mark}=")
    assert json.loads(Path(url.removeprefix("file://")).read_text()) == json_schema.schema()
