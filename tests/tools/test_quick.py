"""`samerun parity --quick`: which rule a task breaks, by what one process sees, by what several have seen, and for real."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Started, train
from rule_breaker import TASK
from torch import Tensor, nn

from app import tasks
from app.errors import DataError, RecipeError
from app.recipe.recipe_file import load
from app.task import Form, Loss
from app.tools import comparison, own_rules, quick
from app.tools.own_rules import CALLS, COUNT, FETCH, LOSS, READY
from app.tools.seen import Pass, Seen, prints_of, read

SAID = {
    "global random state": "field 'x' of sample 0 of the training samples of table.py differs when",
    "a generator of its own": "field 'x' of sample 0 of the training samples of table.py differs when",
    "rank": "rule broken (fetch): x of sample ",
    "random in ready": "rule broken (ready): x of sample ",
    "a mean of means": "rule broken (loss): the loss of a batch is ",
    "a loss over the batch": "rule broken (loss): the loss of a batch is ",
    "a part past the model": "rule broken (one call): `loss` calls ",
    "unused parameter": "2 trainable parameters have no gradient after the first step's backward passes: extra.weight, ",
}
"""How each task that breaks a rule is told of it. The first two are found before anything is trained."""
REALLY = ("rank", "a mean of means", "unused parameter")
"""What one process sees of the others is tested below, in this one."""


@pytest.fixture
def recipe(tmp_path: Path, own_imports: None) -> Path:
    (tmp_path / "table.py").write_text(TASK)
    (tmp_path / "table.yaml").write_text("task: table.py\ntrain: {global_batch_size: 16, steps: 6}\nlog: {every_steps: 1}\n")
    return tmp_path / "table.yaml"


def examined(recipe: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "launch.cli", "parity", "--quick", "--recipe", str(recipe), *words]
    finished = Started(command).wait()
    return finished.returncode, finished.output


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_task_that_keeps_the_rules_passes_and_a_run_asks_for_no_more(recipe: Path) -> None:
    def started(name: str) -> str:
        return train("cpu", recipe.parent / name, "--recipe", str(recipe), "train.steps=1").check().output

    asks = f"`samerun parity --quick --recipe {recipe}`"
    assert asks in started("before")
    code, said = examined(recipe)
    assert code == 0, said
    assert said.startswith("3 steps of 16 samples on 1 process, 1 process with accumulation 2, 2 processes:\n"), said
    assert asks not in started("after")
    (recipe.parent / "table.py").write_text(TASK + "# changed\n")
    assert asks in started("changed")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("broken", [pytest.param(name, marks=() if name in REALLY else pytest.mark.long) for name in SAID])
def test_each_broken_rule_is_named(recipe: Path, broken: str) -> None:
    code, said = examined(recipe, f"rule.broken={broken}")
    assert code == 1, said
    assert SAID[broken] in said


@pytest.mark.slow
@pytest.mark.multiproc
def test_what_is_shipped_passes() -> None:
    code, said = examined(Path("digits"), "augment.mixup=0.2", "augment.crop_padding=2")
    assert code == 0, said


# What one process sees --------------------------------------------------------------------------------------------------


def seen_alone(recipe: Path, broken: str) -> list[tuple[str, str]]:
    found = load(str(recipe), [f"rule.broken={broken}"]).recipe
    task = tasks.of(found)
    samples = task.samples("train")
    torch.manual_seed(found.seed)  # as a run does: which rule is named depends on the weights
    return own_rules.broken(found, task, samples, task.model(samples.facts), form=Form(), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("broken", "rule", "words"),
    [
        ("random in ready", READY, "x of sample "),
        ("a part past the model", CALLS, "`loss` calls body, last of the model directly"),
        ("a mean of means", LOSS, "a mean of means"),
        ("a loss over the batch", LOSS, "depends on other samples of its pass"),
    ],
)
def test_what_one_process_sees_of_a_broken_rule(recipe: Path, broken: str, rule: str, words: str) -> None:
    assert seen_alone(recipe, "nothing") == []
    ((name, text),) = seen_alone(recipe, broken)
    assert name == rule
    assert words in text


@pytest.mark.parametrize("broken", ["global random state", "a generator of its own"])
def test_samples_that_are_others_when_they_are_fetched_again_are_refused_before(recipe: Path, broken: str) -> None:
    with pytest.raises(DataError, match=r"field 'x' of sample \d+ of the training samples of table\.py differs when"):
        seen_alone(recipe, broken)


# What is compared ------------------------------------------------------------------------------------------------------


def of(values: Tensor, *, first: int = 0) -> dict[int, Any]:
    return prints_of({"x": values, "samples": torch.arange(first, first + len(values))})


def seen(path: Path = Path(), **changes: Any) -> Seen:
    """Two steps of four samples in one pass each."""
    rows = of(torch.arange(8.0)[:, None])
    passes = [Pass(step, tuple(range(4 * step, 4 * step + 4)), 2.0, 4.0) for step in (0, 1)]
    whole = Seen(path, fetch=rows, ready=rows, passes=passes, norms=[1.0, 0.5], weighed=[4.0, 4.0])
    return dataclasses.replace(whole, **changes)


def told(other: Seen, *, alone: Seen | None = None) -> tuple[str, str]:
    found = comparison.broken({"1 process": alone or seen(), "1 process with accumulation 2": seen(), "2 processes": other})
    assert found is not None
    return found


HALVES = [Pass(step, (4 * step + at, 4 * step + at + 1), 1.0, 2.0) for step in (0, 1) for at in (0, 2)]


def test_halves_of_a_pass_are_the_same_as_the_pass() -> None:
    assert comparison.broken({"1 process": seen(), "2 processes": seen(passes=HALVES)}) is None


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        (
            {"fetch": of(torch.arange(8.0)[:, None] + 1)},
            FETCH,
            "x of sample 0 after `fetch` differs between 1 process and 2",
        ),
        (
            {"ready": of(torch.arange(8.0)[:, None] * 2)},
            READY,
            "x of sample 1 after `ready` differs between 1 process and 2",
        ),
        (
            {"weighed": [4.0, 3.0]},
            COUNT,
            "Loss.count of step 2 adds up to 4 on 2 processes, and its gradient is weighed as over 3",
        ),
        (
            {"passes": [HALVES[0]] * 2 + HALVES[2:], "norms": [1.1, 0.5]},
            LOSS,
            "the gradient norm of step 1 is 1 on 1 process and",
        ),
        (
            {"passes": [Pass(0, (0,), 4.0, 4.0), *HALVES[2:]]},
            LOSS,
            "the loss of step 1 is 0.5 on 1 process and 1 on 2 processes",
        ),
    ],
)
def test_the_rule_is_named_that_a_difference_shows_to_be_broken(changes: dict[str, Any], rule: str, words: str) -> None:
    assert told(seen(**changes))[0] == rule
    assert told(seen(**changes))[1].startswith(words)


def test_the_first_rule_is_named_and_what_a_layer_makes_different_anyway_is_not() -> None:
    spoilt = seen(fetch=of(torch.ones(8, 1)), ready=of(torch.ones(8, 1)), weighed=[3.0, 4.0], norms=[2.0, 0.5])
    assert told(spoilt)[0] == FETCH
    assert told(spoilt, alone=seen(broken=[(FETCH, "said by itself")]))[1] == "said by itself"
    assert told(seen(), alone=seen(broken=[(CALLS, "called twice")], passes=[], norms=[])) == (CALLS, "called twice")
    drawn = seen(norms=[2.0, 0.5], depends=["2 batch normalization layers"])
    assert comparison.broken({"1 process": seen(), "2 processes": drawn}) is None


def test_rounding_and_other_padding_are_no_difference_and_a_value_is() -> None:
    rows = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    rounded = rows * (1 + 2**-23)
    assert own_rules.first_difference(of(rows), of(rounded)) is None
    assert own_rules.first_difference(of(rows), of(torch.cat([rows, torch.zeros(4, 2)], 1))) is None
    changed = rows.clone()
    changed[2, 1] += 1e-3
    assert own_rules.first_difference(of(rows), of(changed)) == ("x", 2)
    changed[2, 1] = float("nan")
    assert own_rules.first_difference(of(rows), of(changed)) == ("x", 2)
    assert own_rules.first_difference(of(rows.round().long()), of(rows.round().long().roll(1, 0))) is not None


def test_what_is_seen_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = seen(tmp_path / "0.json", sources="abc", broken=[(LOSS, "so")])
    one.write()
    assert dataclasses.replace(read(tmp_path), path=one.path) == one


@pytest.mark.parametrize(
    ("whole", "rule", "words"),
    [
        (Loss(torch.tensor(3.0), 4), None, ""),
        (Loss(torch.tensor(2.5), 4), LOSS, "a mean of means"),
        (Loss(torch.tensor(5.5), 4), LOSS, "depends on other samples of its pass"),
        (Loss(torch.tensor(3.0), 1), COUNT, "Loss.count of a batch is 1, and those of its halves add up to 4"),
    ],
)
def test_a_batch_against_its_halves(whole: Loss, rule: str | None, words: str) -> None:
    """1 thing of loss 0 and 3 of loss 4."""
    found = own_rules.of_halves(whole, Loss(torch.tensor(0.0), 1), Loss(torch.tensor(4.0), 3))
    assert [name for name, _ in found] == ([] if rule is None else [rule])
    assert words in "".join(text for _, text in found)


def test_calls_past_the_model_are_seen_and_those_inside_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with own_rules.calls_of(model) as called:
        model[1](model(torch.ones(1, 2)))
    assert called == [""]
    with own_rules.calls_of(model) as called:
        model[2](model(torch.ones(1, 2)))
        model(torch.ones(1, 2))
    assert called == ["", "2", ""]


def test_the_batch_can_be_halved_and_neighbours_stay_together() -> None:
    assert quick.batch_of(load("digits", []).recipe) == 32
    assert quick.batch_of(load("digits", ["train.global_batch_size=6"]).recipe) == 6
    with pytest.raises(RecipeError, match=r"train\.global_batch_size is 7: --quick needs a multiple of 2"):
        quick.batch_of(load("digits", ["train.global_batch_size=7"]).recipe)
    with pytest.raises(RecipeError, match="needs a multiple of 4, to compare halves"):
        quick.batch_of(load("digits", ["train.global_batch_size=6", "augment.mixup=0.2"]).recipe)


def test_keys_that_quick_sets_itself_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"train\.steps \(command line\): --quick sets it"):
        quick.main("digits", ["train.steps=9"])
