"""Recipes written out and read back, their digest and their reference, and the recipes of the package."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app import tasks
from app.recipe import optimizers, recipe_file, recipe_keys
from app.recipe.recipe_file import load
from app.recipe.schema import OptimRecipe, Recipe
from app.tasks.image_classification import model_names

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "app").rglob("*.yaml"))


def of_type(hint) -> st.SearchStrategy:
    """Values that a field of a recipe may have by its type."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        inner, *rest = get_args(hint)
        sizes = {"min_size": 1, "max_size": 3} if rest == [Ellipsis] else {"min_size": 1 + len(rest), "max_size": 1 + len(rest)}
        return st.lists(of_type(inner), **sizes).map(tuple)
    if hint in (bool, int, float, str):
        return {
            bool: st.booleans(),
            int: st.integers(2, 2**40),
            float: st.floats(1e-12, 1),
            str: st.text() | st.sampled_from(["none", "Null", "no", "1e-3", "~", "a: b", "- a", "# a", "'", '"', "x\ny"]),
        }[hint]
    return st.none() | of_type(get_args(hint)[0])


def section_of(cls) -> st.SearchStrategy:
    return st.fixed_dictionaries({field.name: of_type(get_type_hints(cls)[field.name]) for field in dataclasses.fields(cls)})


@st.composite
def recipes(draw) -> Recipe:
    sections = {section: draw(section_of(cls)) for section, cls in recipe_keys.sections(tasks.DEFAULT).items()}
    # The rules between keys (_contradictions), each met by choosing one side.
    sections["train"]["steps"] = sections["train"]["evaluate_every_steps"] = sections["optim"]["warmup_steps"] = None
    sections["train"]["init_allow"] = None
    sections["train"]["global_batch_size"] *= 2
    sections["augment"]["randaugment_magnitude"] *= 10
    sections["model"]["name"] = draw(st.sampled_from(model_names.known()))
    if sections["train"]["max_gradient_spike"] is not None:
        sections["train"]["max_gradient_spike"] += 2
    if sections["train"]["validation_fraction"] is not None:
        sections["train"]["validation_fraction"] /= 2
    sections["optim"]["name"] = draw(st.sampled_from(sorted(optimizers.TABLE)))
    sections["optim"]["settings"] = ("amsgrad=true",) if sections["optim"]["name"] == "adam" else None
    sections["optim"]["groups"] = draw(st.none() | st.just(("* lr_factor=0.5", "[ab]?.'\"#: weight_decay=1e-3")))
    sections["profile"]["steps"] = draw(st.sampled_from([None, "10:20"]))
    sections["data"] |= {"image_size": 32, "std": sections["data"]["mean"]}
    sections["data"]["hub_revision"] = draw(st.sampled_from([None, "0123456789" * 4, "deadbeef" * 5]))
    if sections["data"]["hub_config"] or sections["data"]["hub_revision"]:
        sections["data"]["source"] = "huggingface"
    if sections["data"]["leave_out"] is not None:
        sections["data"]["source"] = "huggingface"
    if sections["data"]["resize_size"] is not None:
        sections["data"]["resize_size"] += 32
    values = {f"{section}.{name}": value for section, of_section in sections.items() for name, value in of_section.items()}
    return recipe_keys.build({"seed": draw(of_type(int)), **values})


@settings(max_examples=50)
@given(recipe=recipes())
def test_yaml_reads_back_to_an_equal_recipe(tmp_path_factory, recipe):
    path = tmp_path_factory.mktemp("recipe") / "again.yaml"
    text = recipe_file.to_yaml(recipe)
    path.write_text(text, encoding="utf-8")
    loaded = load(str(path))
    assert loaded.recipe == recipe
    assert recipe_file.digest(loaded.recipe) == recipe_file.digest(recipe)
    assert set(loaded.origins.values()).isdisjoint({"default", "command line"})
    # Any other YAML reader sees the same values, and so does this one in what --print-recipe shows.
    assert yaml.safe_load(text) == recipe_file.as_dict(recipe)
    path.write_text(recipe_file.render(loaded), encoding="utf-8")
    assert load(str(path)).recipe == recipe


def test_as_dict_against_dataclasses():
    recipe = load("digits").recipe
    plain = recipe_file.as_dict(recipe)
    assert plain["data"]["mean"] == list(recipe.sections.data.mean)
    values_of = dataclasses.asdict(recipe)
    values_of |= values_of.pop("sections")
    assert plain.keys() == values_of.keys()
    for section, values in values_of.items():
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()} if isinstance(values, dict) else values
        assert plain[section] == lists


def test_digest_is_of_what_is_learnt():
    digest = recipe_file.digest
    same = [
        "log.every_steps=3",
        "data.stage_to=/tmp",
        "profile.steps=2:3",
        "log.samples=true",
        "train.max_micro_batch=4",
        "data.download=true",
        "optim.eps=1.0e-8",
    ]
    assert digest(load("digits", same).recipe) == digest(load("digits").recipe)
    of_all = recipe_file.digest_of_all
    assert of_all(load("digits", ["log.every_steps=3"]).recipe) != of_all(load("digits").recipe)
    assert digest(Recipe(optim=OptimRecipe(lr=1))) == digest(Recipe(optim=OptimRecipe(lr=1.0)))
    changes = ["seed=1", "optim.lr=0.1", "train.epochs=21", "model.channels=1,2", "data.mean=0.1", "augment.flip=0.5"]
    assert len({digest(load("digits", [change]).recipe) for change in changes} | {digest(load("digits").recipe)}) == 7


def test_digest_is_stable():
    """A change of this value means that runs of earlier versions no longer resume: say so in the changelog."""
    assert recipe_file.digest(Recipe()) == "5411d8491ab0b6309e19d7ba35cd943f403dbd7430298eee93a11a271f9d9cbd"


def test_render_says_where_each_value_came_from():
    lines = recipe_file.render(load("digits", ["optim.lr=0.25"])).splitlines()
    shown = {line.split("#")[0].strip(): line.partition("# ")[2] for line in lines if "#" in line}
    assert shown["lr: 0.25"] == "command line"
    assert re.fullmatch(r"digits\.yaml:\d+", shown["source: digits"])
    assert shown["momentum: 0.9"] == "default"
    assert len({line.index("# ") for line in lines if "# " in line}) == 1  # aligned
    assert sum("# " in line for line in lines) == len(recipe_file.flat(Recipe()))


def test_reference_explains_every_key():
    text = recipe_file.reference()
    for key, default in recipe_file.flat(Recipe()).items():
        entry = re.search(rf"^ *{re.escape(key)}=(.+)  \((.+)\)\n +(.+)$", text, re.MULTILINE)
        assert entry, key
        assert yaml.safe_load(entry[1]) == default
        assert len(entry[3]) > 8
    assert "one of cosine, step, constant" in text
    assert "Peak learning rate" in text


# The recipes of the package ------------------------------------------------------------------------------------------------


def test_shipped_recipes_are_all_found():
    assert [path.stem for path in SHIPPED] == recipe_file.names()
    assert {"digits", "fashion_mnist", "mnist", "cifar10", "imagenet_resnet50", "imagefolder"} <= set(recipe_file.names())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe(path):
    loaded = load(path.stem)
    assert loaded.recipe == load(str(path)).recipe
    given_keys = [key for key, origin in loaded.origins.items() if origin != "default"]
    assert len(given_keys) >= 5
    text = path.read_text(encoding="ascii")
    assert text.startswith("# ")
    # Files that a comment sends the reader to exist; a name in capitals stands for the reader's own.
    for cited in re.findall(r"#.*?\b((?:app|docs|launch)/[\w./-]+\.\w+)", text):
        assert (ROOT / cited).is_file(), cited


def test_imagenet_recipe_is_that_of_goyal_et_al():
    """Goyal et al. 2017, section 5.1, as the paper says it."""
    recipe = load("imagenet_resnet50").recipe
    assert (recipe.train.epochs, recipe.train.global_batch_size) == (90, 256)
    assert (recipe.optim.lr, recipe.optim.lr_reference_batch, recipe.optim.weight_decay) == (0.1, 256, 1e-4)
    assert (recipe.optim.decay_epochs, recipe.optim.decay_factor, recipe.optim.warmup_epochs) == ((30, 60, 80), 0.1, 5)
    assert (recipe.optim.name, recipe.optim.momentum, recipe.optim.nesterov) == ("sgd", 0.9, True)


def test_reading_a_recipe_needs_no_torch():
    code = (
        "import sys; from app.recipe import recipe_file; recipe_file.load('digits'); recipe_file.reference();"
        "print({'torch', 'numpy', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
