"""The rules of a user's task, checked at every start: a task that breaks one takes no step, under any preset."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Finished, train
from rule_breaker import TASK
from torch import nn

from app.task import Loss
from app.tasks.own import rules

pytestmark = pytest.mark.multiproc

BROKEN = {
    "a loss over the batch": "(loss): the loss of a batch is ",
    "a sum given as mean": "(loss): the loss of a batch is ",
    "a buffer updated in forward": "(loss): the model changes its buffer center in each forward pass",
    "random numbers in the loss": "(loss): `loss` draws random numbers outside model(...)",
    "weights of a criterion": "(weights): Table.temperatures['one'][0].weight [1, 1], Table.temperatures['one'][0].bias [1] ",
}
PRESETS = ("multi_gpu", "deepspeed_zero2", "fsdp2")
RING = list(zip(BROKEN, itertools.cycle(PRESETS), strict=False))
MATRIX = [
    pytest.param(broken, preset, marks=() if (broken, preset) in RING else pytest.mark.long)
    for broken in BROKEN
    for preset in PRESETS
]
ALONE = {
    "random in ready": "(ready): x of sample ",
    "a part past the model": "(one call): `loss` calls body, last of the model directly",
    "a mean of means": "a mean of means, or a mean over something else",
    "random numbers of its own": "`loss` or the model draws random numbers, or keeps state between passes",
    "weights out of sight": "(weights): a tensor of a global variable or another object [3] is a weight outside the model",
    "another count": "(count): Loss.count of 4 samples is 12, and their gradient is weighed as that of a mean over 6.",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "table.py").write_text(TASK)
    (tmp_path / "table.yaml").write_text("task: table.py\ntrain: {global_batch_size: 16, steps: 3}\n")
    return tmp_path / "table.yaml"


def started(recipe: Path, broken: str, preset: str = "cpu", processes: int = 1) -> Finished:
    return train(preset, recipe.parent / "run", "--recipe", str(recipe), f"rule.broken={broken}", processes=processes)


def refusal(finished: Finished) -> str:
    (said,) = {line.partition("TrainingError: ")[2] for line in finished.output.splitlines() if "Error: " in line}
    assert finished.returncode == 8, finished.output
    return said


@pytest.mark.parametrize(("broken", "preset"), MATRIX)
def test_a_broken_rule_is_told_before_the_first_step_as_on_one_process(recipe: Path, broken: str, preset: str) -> None:
    said = refusal(started(recipe, broken, preset, processes=2))
    assert said.startswith(f"table.py breaks a rule {BROKEN[broken]}")
    assert not (recipe.parent / "run").exists()
    if (broken, preset) in RING:
        assert said == refusal(started(recipe, broken))


@pytest.mark.parametrize("broken", ALONE)
def test_what_else_one_process_sees(recipe: Path, broken: str) -> None:
    assert ALONE[broken] in refusal(started(recipe, broken))
    assert not (recipe.parent / "run").exists()


def test_a_count_that_only_some_samples_show_ends_the_run_after_a_step(recipe: Path) -> None:
    finished = started(recipe, "another count of one sample", "multi_gpu", 2)
    assert "the losses since step 0 are means over " in refusal(finished)
    assert "add a method `def count(self, batch): return ...` to the task" in finished.output


@pytest.mark.parametrize(
    ("whole", "rule", "words"),
    [
        (Loss(torch.tensor(3.0), 4), None, ""),
        (Loss(torch.tensor(4.0), 4), "loss", "the mean is a sum: return Loss.of(sum, count)"),
        (Loss(torch.tensor(2.5), 4), "loss", "a mean of means"),
        (Loss(torch.tensor(5.5), 4), "loss", "depends on other samples of its pass"),
        (Loss(torch.tensor(3.0), 1), "count", "Loss.count of a batch is 1, and those of its halves add up to 4"),
    ],
)
def test_a_batch_against_its_halves(whole: Loss, rule: str | None, words: str) -> None:
    """1 thing of loss 0 and 3 of loss 4."""
    halves = Loss(torch.tensor(0.0), 1), Loss(torch.tensor(4.0), 3)
    if rule is None:
        rules.check_halves(whole, *halves)
        return
    with pytest.raises(rules.Broken) as error:
        rules.check_halves(whole, *halves)
    assert error.value.rule == rule
    assert words in str(error.value)


def test_a_loss_of_nothing_but_rounding_breaks_no_rule() -> None:
    rules.check_halves(Loss(torch.tensor(3e-9), 4), Loss(torch.tensor(1e-8), 2), Loss(torch.tensor(-2e-8), 2))


@pytest.mark.parametrize("made", [Loss, lambda mean, count: Loss.of(mean * count, count)])
def test_counts_that_are_weights_may_be_less_than_one(made: Callable[[torch.Tensor, torch.Tensor], Loss]) -> None:
    quarter = torch.tensor(0.25)
    rules.check_halves(made(torch.tensor(2.0), 2 * quarter), made(torch.tensor(1.0), quarter), made(torch.tensor(3.0), quarter))


def test_calls_past_the_model_are_seen_and_those_inside_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with rules.calls_of(model, lambda _: None) as called:
        model[1](model(torch.ones(1, 2)))
    assert called == [""]
    with rules.calls_of(model, lambda _: None) as called:
        model[2](model(torch.ones(1, 2)))
        model(torch.ones(1, 2))
    assert called == ["", "2", ""]
