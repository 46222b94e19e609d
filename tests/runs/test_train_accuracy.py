"""The accuracy on the training data: what was right of every global batch, whoever computed which part of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import read_lines, train

from app.checkpoints import model_file
from app.data.open import open_data
from app.metrics.losses import Losses
from app.recipe import recipe_file

EVERY_STEPS = 3
# No learning: the model stays the known one of the finished run.
KNOWN = ("--recipe", "digits", "train.steps=10", "train.global_batch_size=64", "optim.lr=0", f"log.every_steps={EVERY_STEPS}")


def recounted(weights: Path, run_dir: Path) -> list[float]:
    """The accuracy of each line, from the saved weights, the batches as they were recorded, and nothing of the loop."""
    recipe = recipe_file.load(str(run_dir / "recipe.yaml")).recipe
    source = open_data(recipe).train
    model = model_file.load(weights)[0].eval()
    steps = [torch.tensor(line["samples"]) for line in read_lines(run_dir / "samples.jsonl")]
    shares, start = [], 0
    for end in [line["step"] for line in read_lines(run_dir / "metrics.jsonl")]:
        samples = torch.cat(steps[start:end])
        images, labels = source.fetch((samples % len(source)).numpy(), None).values()
        with torch.no_grad():
            best = model((images / 255.0 - recipe.data.mean[0]) / recipe.data.std[0]).argmax(1)
        shares.append(float((best == labels).double().mean()))
        start = end
    return shares


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "processes", "micro_batch"), [("cpu", 1, 64), ("multi_gpu", 2, 16)])
def test_it_is_that_of_whole_global_batches(
    digits_run: Path, tmp_path: Path, preset: str, processes: int, micro_batch: int
) -> None:
    own = (f"train.max_micro_batch={micro_batch}", "log.samples=true", "--init-from", str(digits_run))
    train(preset, tmp_path / "run", *KNOWN, *own, processes=processes).check()
    found = [line["accuracy"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(found) == 4
    assert found == recounted(digits_run, tmp_path / "run")
    assert 0.5 < min(found) < max(found)


@pytest.mark.multiproc
@pytest.mark.parametrize("switch", ["log.train_scores=false", "augment.mixup=0.2"])
def test_it_is_unknown_where_it_is_off_or_targets_are_mixed(tmp_path: Path, switch: str) -> None:
    train("cpu", tmp_path / "run", *KNOWN, "train.steps=1", switch).check()
    assert [line["accuracy"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [None]


@pytest.mark.parametrize("few_logits", [12, 11])
@pytest.mark.parametrize("verdict", [bool, torch.tensor])  # as a CPU's and a GPU's steps tell it
def test_a_skipped_step_has_no_part_in_it(
    monkeypatch: pytest.MonkeyPatch, few_logits: int, verdict: Callable[[bool], bool | torch.Tensor]
) -> None:
    monkeypatch.setattr(Losses, "_FEW_LOGITS", few_logits)  # counted later, or at once
    losses = Losses(torch.device("cpu"))
    for step in range(100):  # more than are added up at once, of two passes each
        for _ in range(2):
            losses.add(torch.tensor(0.5 if step % 10 else math.nan), 4)
            # Two of four answers are right; in a skipped step all are.
            labels = torch.tensor([0, 1, 2, 2] if step % 10 else [0, 1, 1, 0])
            losses.add_answers(torch.eye(3)[[0, 1, 1, 0]], labels)
        losses.end_step(skipped=verdict(step % 10 == 0))
    assert losses.take().tolist() == [90 * 2 * 4 * 0.5, 90 * 2 * 2]
    assert losses.take().tolist() == [0.0, 0.0]
