"""The keys of a mixture: what is wrong with them is said before a run starts, and a recipe keeps them as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import RecipeError
from app.recipe import recipe_file

SOURCES = "data.sources=[{path: a/web, weight: 7}, {path: b/web, weight: 3, name: code}]"
PHASES = "data.phases=[{from_step: 30, weights: {web: 0.5, code: 0.5}}]"


def test_a_recipe_with_a_mixture_is_written_and_read_back(tmp_path: Path) -> None:
    loaded = recipe_file.load("lm_tiny", [SOURCES, PHASES])
    (tmp_path / "again.yaml").write_text(recipe_file.to_yaml(loaded.recipe))
    again = recipe_file.load(str(tmp_path / "again.yaml"))
    assert again.recipe == loaded.recipe
    assert again.recipe.sections.data.folders == {"web": "a/web", "code": "b/web"}
    assert again.recipe.inputs == {"data.sources, web,": "a/web", "data.sources, code,": "b/web"}
    moved = recipe_file.load("lm_tiny", [SOURCES.replace("a/web", "c/web"), PHASES])
    left = [recipe_file.without_places(recipe_file.flat(it.recipe), "causal_lm") for it in (loaded, moved)]
    assert left[0] == left[1]
    assert left[0]["data.sources"] == [{"weight": 7}, {"weight": 3, "name": "code"}]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data.sources=[{path: a}]"], "each source must have a path and a weight, and may have a name"),
        (["data.sources=[{path: a, weight: 1, wieght: 2}]"], "each source must have a path and a weight"),
        (["data.sources=[{path: a, weight: high}]"], "give a number of 0 or more"),
        (["data.sources=[{path: a, weight: 0}]"], "all weights are 0: give one that is greater"),
        (["data.sources=[{path: x/a, weight: 1}, {path: y/a, weight: 1}]"], "the sources are called a, a"),
        (
            ["data.sources=[{path: a, weight: 1}, {path: b, weight: 1e-6}]"],
            "the share of b is less than a sample in a window of 65,536",
        ),
        (["data.sources=a"], "expected a list of mappings"),
        ([SOURCES, "data.path=c"], "give one of them"),
        ([PHASES], "phases change the weights of sources"),
        ([SOURCES, "data.phases=[{from_step: 9, weights: {web: 1}}]"], "weights, one for each of web, code"),
        ([SOURCES, "data.phases=[{from_step: 9, weights: {web: 1, code: -1}}]"], "give a number of 0 or more"),
        ([SOURCES, "data.phases=[{from_step: 1, weights: {web: 1, code: 1}}]"], "in ascending order from 2 on"),
        ([SOURCES, "data.phases=[{weights: {web: 1, code: 1}}]"], "each phase must have a from_step"),
        ([SOURCES, "train.epochs=3"], "train.epochs is 3: the training samples are a mixture .*: give train.steps instead"),
        ([SOURCES, "train.steps=null"], "give the length of the run in steps"),
        ([SOURCES, "train.evaluate_every_epochs=1"], "give train.evaluate_every_steps instead"),
        ([SOURCES, "optim.warmup_epochs=1"], "give optim.warmup_steps instead"),
        ([SOURCES, "optim.schedule=step"], "this schedule counts them"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence) as refused:
        recipe_file.load("lm_tiny", words)
    assert len(refused.value.problems) == 1
    assert "command line" in str(refused.value)
