"""The rules of a user's task, checked at every start: a task that breaks one takes no step, under any preset."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from processes import Finished, train
from rule_breaker import TASK

from app import tasks
from app.distributed import sample_dropout
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import TrainingError
from app.recipe.recipe_file import load
from app.recipe.schema import BatchPlan
from app.task import Form, Loss
from app.tasks.own import rules

BROKEN = {
    "nothing": "",
    "a loss over the batch": "(loss): the loss of a batch is ",
    "a sum given as mean": "(loss): the loss of a batch is ",
    "a mean of means": "(loss): the loss of a batch is ",
    "a buffer updated in forward": "(loss): the model changes its buffers (center) in each forward pass",
    "random numbers of its own": "`loss` or the model draws random numbers, or keeps state between passes",
    "random in ready": "(ready): x of sample ",
    "a part past the model": "(one call): `loss` calls body, last of the model directly",
    "weights of a criterion": "(weights): the loss depends on trainable tensors outside the model, of the shapes [1], [1, 1]",
    "functional dropout": "in the model, a Net), so the result would depend on the topology (here global batch 16 = micro-"
    "batch 8 x accumulation 2 x 1 process). Set drop_rate (now 0.1) to 0, use layers such as nn.Dropout",
    "missing values": "the first loss is nan, and so are numbers in x of its batch (samples 0, 21, ",
    "weights out of sight": "(weights): the loss depends on trainable tensors outside the model, of the shapes [3]: ",
}


@pytest.fixture
def recipe(tmp_path: Path, own_imports: None) -> Path:
    (tmp_path / "table.py").write_text(TASK)
    (tmp_path / "table.yaml").write_text("task: table.py\ntrain: {global_batch_size: 16, steps: 3}\n")
    return tmp_path / "table.yaml"


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_named(recipe: Path, broken: str) -> None:
    loaded = load(str(recipe), [f"rule.broken={broken}"]).recipe
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=16, data_ranks=1, accumulation=2))
    task = tasks.of(loaded)
    samples, model = task.samples("train"), task.model({})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dropout = sample_dropout.give_to_samples(model, 0)
    if BROKEN[broken]:
        with pytest.raises(TrainingError) as refused:
            rules.check(runtime, loaded, task, samples, model, dropout=dropout, form=Form())
        assert BROKEN[broken] in str(refused.value)
    else:
        rules.check(runtime, loaded, task, samples, model, dropout=dropout, form=Form())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def refusal(recipe: Path, broken: str, preset: str) -> tuple[str, Finished]:
    words = ("--recipe", str(recipe), f"rule.broken={broken}")
    finished = train(preset, recipe.parent / "run", *words, processes=2)
    (said,) = {line.partition("TrainingError: ")[2] for line in finished.output.splitlines() if "Error: " in line}
    assert finished.returncode == 8, finished.output
    return said, finished


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("broken", "preset"),
    [
        ("a loss over the batch", "multi_gpu"),
        ("a buffer updated in forward", "deepspeed_zero2"),
        ("weights of a criterion", "fsdp2"),
    ],
)
def test_a_broken_rule_is_refused_before_the_first_step_under_any_preset(recipe: Path, broken: str, preset: str) -> None:
    assert BROKEN[broken] in refusal(recipe, broken, preset)[0]
    assert not (recipe.parent / "run").exists()


@pytest.mark.multiproc
@pytest.mark.parametrize("broken", ["another count", "another count of one sample"])
def test_another_count_than_that_of_the_gradient_ends_the_run_after_a_step(recipe: Path, broken: str) -> None:
    said, finished = refusal(recipe, broken, "multi_gpu")
    assert "the losses since step 0 are means over " in said
    assert "add a method `def count(self, batch): return ...` to the task" in finished.output


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([(3.0, 4), (0.0, 1), (4.0, 3)], None),
        ([(3e-9, 4), (1e-8, 2), (-2e-8, 2)], None),  # nothing but rounding
        ([(2.0, 0.5), (1.0, 0.25), (3.0, 0.25)], None),  # counts that are weights, of less than one
        ([(5.5, 4), (0.0, 1), (4.0, 3)], r"\(loss\): the loss of a batch is 5.5, and the mean of its halves, .* 3. Either"),
        ([(3.0, 1), (0.0, 1), (4.0, 3)], r"\(count\): Loss.count of a batch is 1, and those of its halves add up to 4"),
    ],
)
def test_a_batch_against_its_halves(losses: list[tuple[float, float]], words: str | None) -> None:
    with pytest.raises(TrainingError, match=words) if words else nullcontext():
        rules.check_halves(*(Loss(torch.tensor(mean), torch.tensor(count)) for mean, count in losses))
