"""Recipes written out and read back, their digest and their reference, and the recipes of the package."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from app import tasks
from app.recipe import recipe_file
from app.recipe.recipe_file import load
from app.recipe.schema import OptimRecipe, Recipe

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "app").rglob("*.yaml"))


ODD = ["", "none", "Null", "no", "1e-3", "~", "a: b", "- a", "# a", "'", '"', "x\ny", "[ab]?.'\"#: ", "\u00e9\u2028\x85"]


@pytest.mark.parametrize(
    "recipe",
    [
        *(load(path.stem).recipe for path in SHIPPED),
        recipe_file.build({"train.skip_steps": ((5, 9), (10, 11))}),
        *(recipe_file.build({"data.path": text, "optim.groups": {text: {"lr_factor": 1e-12}}}) for text in ODD),
    ],
    ids=[*(path.stem for path in SHIPPED), "pairs", *map(repr, ODD)],
)
def test_yaml_reads_back_to_an_equal_recipe(tmp_path, recipe):
    path = tmp_path / "again.yaml"
    text = recipe_file.to_yaml(recipe)
    path.write_text(text, encoding="utf-8")
    loaded = load(str(path))
    assert loaded.recipe == recipe
    assert recipe_file.digest(loaded.recipe) == recipe_file.digest(recipe)
    assert set(loaded.origins.values()).isdisjoint({"default", "command line"})
    # Any other YAML reader sees the same values, and so does this one in what --print-recipe shows.
    nested = yaml.safe_load(text)
    found = {key: nested[section][name] if section else nested[name] for key in recipe_file.flat(recipe)
             for section, _, name in [key.rpartition(".")]}  # fmt: skip
    assert found == recipe_file.flat(recipe)
    path.write_text(recipe_file.render(loaded), encoding="utf-8")
    assert load(str(path)).recipe == recipe


def test_digest_is_of_what_is_learnt():
    digest = recipe_file.digest
    same = "log.every_steps=3 data.stage_to=/tmp log.samples=true train.max_micro_batch=4 data.download=true optim.eps=1.0e-8"
    assert digest(load("digits", same.split()).recipe) == digest(load("digits").recipe)
    of_all = recipe_file.digest_of_all
    assert of_all(load("digits", ["log.every_steps=3"]).recipe) != of_all(load("digits").recipe)
    assert digest(Recipe(optim=OptimRecipe(lr=1))) == digest(Recipe(optim=OptimRecipe(lr=1.0)))
    changes = ["seed=1", "optim.lr=0.1", "train.epochs=21", "model.channels=1,2", "data.mean=0.1", "augment.flip=0.5"]
    groups = ["{a: {lr_factor: 2}, b: {lr_factor: 3}}", "{b: {lr_factor: 3}, a: {lr_factor: 2}}"]  # the first match counts
    changes += [f"optim.groups={text}" for text in groups]
    assert len({digest(load("digits", [change]).recipe) for change in changes} | {digest(load("digits").recipe)}) == 9


def test_digest_is_stable():
    """A change of this value means that a finished run of an earlier version is no longer called finished if started again."""
    assert recipe_file.digest(Recipe()) == "d9957e4cc911d85bd1f356b7d4eb93a8f9629366fae6a22f6eb12f673495ea84"


def test_render_says_where_each_value_came_from():
    lines = recipe_file.render(load("digits", ["optim.lr=0.25"])).splitlines()
    shown = {line.split("#")[0].strip(): line.partition("# ")[2] for line in lines if "#" in line}
    assert shown["lr: 0.25"] == "command line"
    assert re.fullmatch(r"digits\.yaml:\d+", shown["source: digits"])
    assert shown["momentum: 0.9"] == "default"
    assert len({line.index("# ") for line in lines if "# " in line}) == 1  # aligned


# The recipes of the package ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", tasks.SHIPPED)
def test_every_shipped_task_has_sections_of_its_own(task):
    own = {field.name for field in fields(recipe_file.sections_of(task))}
    assert own
    assert own.isdisjoint(field.name for field in fields(Recipe))
    assert all(recipe_file.meanings(task)[key] for key in {*recipe_file.kinds(task), *own})
    assert recipe_file.marked("not_learnt", task) | recipe_file.marked("places", task) < recipe_file.kinds(task).keys()


@pytest.mark.parametrize("overrides", [["model.layers=4"], ["task=causal_lm", "model.layers=4"]])
def test_the_file_or_the_command_line_names_the_task(tmp_path, overrides):
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  heads: 2\n" + ("" if "task=causal_lm" in overrides else "task: causal_lm\n"))  # at any place
    recipe = load(str(file), overrides).recipe
    assert (recipe.task, recipe.sections.model.layers, recipe.sections.model.heads) == ("causal_lm", 4, 2)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe(path):
    text = path.read_text(encoding="ascii")
    assert text.startswith("# ")
    # Files that a comment names exist; a name in capitals stands for the reader's own.
    for cited in re.findall(r"#.*?\b((?:app|docs|launch)/[\w./-]+\.\w+)", text):
        assert (ROOT / cited).is_file(), cited


def test_imagenet_recipe_is_that_of_goyal_et_al():
    """Goyal et al. 2017, section 5.1, as the paper says it."""
    recipe = load("imagenet_resnet50").recipe
    assert (recipe.train.epochs, recipe.train.global_batch_size) == (90, 256)
    assert (recipe.optim.lr, recipe.optim.lr_reference_batch, recipe.optim.weight_decay) == (0.1, 256, 1e-4)
    assert (recipe.optim.decay_epochs, recipe.optim.decay_factor, recipe.optim.warmup_epochs) == ((30, 60, 80), 0.1, 5)
    assert (recipe.optim.name, recipe.optim.momentum, recipe.optim.nesterov) == ("sgd", 0.9, True)
