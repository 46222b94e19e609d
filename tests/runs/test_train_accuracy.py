"""The accuracy on the training data: what was right of every global batch, whoever computed which part of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import read_lines, train

from app.checkpoints import stored_weights
from app.errors import TrainingError
from app.metrics.metrics import Losses
from app.recipe import recipe_file
from app.task import Loss
from app.tasks.image_classification.data.open import open_data

EVERY_STEPS = 3
# No learning: the model stays the known one of the finished run.
KNOWN = ("--recipe", "digits", "train.steps=10", "train.global_batch_size=64", "optim.lr=0", f"log.every_steps={EVERY_STEPS}")


def recounted(weights: Path, run_dir: Path) -> list[float]:
    """The accuracy of each line, from the saved weights, the batches as they were recorded, and nothing of the loop."""
    recipe = recipe_file.load(str(run_dir / "recipe.yaml")).recipe
    source = open_data(recipe.sections)["train"]
    _, model, _ = stored_weights.load(weights)
    steps = [torch.tensor(line["samples"]) for line in read_lines(run_dir / "samples.jsonl")]
    shares, start = [], 0
    for end in [line["step"] for line in read_lines(run_dir / "metrics.jsonl")]:
        samples = torch.cat(steps[start:end])
        images, labels = source.fetch((samples % len(source)).numpy(), None).values()
        with torch.no_grad():
            best = model((images / 255.0 - recipe.sections.data.mean[0]) / recipe.sections.data.std[0]).argmax(1)
        shares.append(float((best == labels).double().mean()))
        start = end
    return shares


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "processes", "micro_batch"), [("cpu", 1, 64), ("multi_gpu", 2, 16)])
def test_it_is_that_of_whole_global_batches(
    digits_run: Path, tmp_path: Path, preset: str, processes: int, micro_batch: int
) -> None:
    own = (f"train.max_micro_batch={micro_batch}", "log.samples=true", f"train.init_from={digits_run}")
    own += ("train.validation_fraction=null",)
    train(preset, tmp_path / "run", *KNOWN, *own, processes=processes).check()
    found = [line["accuracy"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(found) == 4
    assert found == recounted(digits_run, tmp_path / "run")
    assert 0.5 < min(found) < max(found)


def passes(answers: list[int], labels: list[int], loss: float) -> Loss:
    return Loss(torch.tensor(loss), 4, {"accuracy": (sum(map(int.__eq__, answers, labels)), 4)})


@pytest.mark.parametrize("verdict", [bool, torch.tensor])  # as a CPU's and a GPU's steps tell it
def test_a_skipped_step_has_no_part_in_it(verdict: Callable[[bool], bool | torch.Tensor]) -> None:
    losses = Losses(torch.device("cpu"))
    for step in range(100):  # more than are added up at once, of two passes each
        for _ in range(2):
            # Two of four answers are right; in a skipped step all are.
            labels, loss = ([0, 1, 2, 2], 0.5) if step % 10 else ([0, 1, 1, 0], math.nan)
            losses.add(passes([0, 1, 1, 0], labels, loss))
        losses.end_step(skipped=verdict(step % 10 == 0))
    assert losses.names == ("accuracy",)
    assert losses.take().tolist() == [90 * 2 * 4 * 0.5, 90 * 2 * 4, 90 * 2 * 2, 90 * 2 * 4]
    assert losses.take().tolist() == [0.0] * 4


def test_a_pass_that_reports_something_else_is_refused() -> None:
    losses = Losses(torch.device("cpu"))
    losses.add(passes([0], [0], 0.5))
    with pytest.raises(TrainingError, match="reports nothing, but reported in its first pass accuracy"):
        losses.add(Loss(torch.tensor(0.5), 1))
