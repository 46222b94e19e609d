"""Which checkpoints a run may go on from, and what is said of those that it may and may not."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import last_of_each, read_lines, train
from saved import piece, refusal, save

from app.checkpoints import step_folders
from app.checkpoints.resumable import Resumed, check_same_run
from app.optim.schedule import length_in_steps
from app.recipe import recipe_file

DATA = {"training data": "1438 samples, abc", "test data": "359 samples, def"}
OF_RUN = ("train.global_batch_size=64", "train.epochs=10", "optim.lr=0.1", "optim.warmup_steps=0")
STEP, PER_EPOCH = 110, 22


def taken_up(
    run_dir: Path, *overrides: str, without: Collection[str] = (), and_with: Mapping[str, Any] | None = None, step: int = STEP
) -> Resumed:
    """Take up, with these overrides, a checkpoint that a program of other keys wrote."""
    values = recipe_file.flat(recipe_file.load("digits", OF_RUN).recipe) | (and_with or {})
    kept = {key: value for key, value in values.items() if key not in without}
    folder = save(run_dir, step, [piece(torch.arange(12.0))], state={"step": step, "recipe": kept, "data": DATA})
    recipe = recipe_file.load("digits", last_of_each([*OF_RUN, *overrides])).recipe
    return check_same_run(folder, recipe, DATA, length_in_steps(recipe.train, dataset_size=1438, global_batch_size=64))


def test_a_key_that_a_checkpoint_does_not_have_has_to_mean_what_was_done_without_it(tmp_path: Path) -> None:
    # The last two decide nothing of what is learnt.
    older = {"without": ("data.jpeg_decoder", "data.color", "train.tf32", "train.deterministic", "checkpoint.every_minutes")}
    assert taken_up(tmp_path, **older) == Resumed(step_folders.path_of(tmp_path, STEP), STEP, None)
    said = refusal(lambda: taken_up(tmp_path, "data.color=gray", **older))
    assert "data.color is 'gray', and the version of Samerun that wrote the checkpoint did not have that key" in said
    assert "data.color=auto is what it did" in said
    assert "jpeg_decoder" not in said
    said = refusal(lambda: taken_up(tmp_path, "train.tf32=true", "train.deterministic=true", **older))
    assert "train.tf32=False is what it did" in said
    assert "deterministic" not in said
    said = refusal(lambda: taken_up(tmp_path, without=("train.max_gradient_spike",)))
    assert "train.max_gradient_spike=null is what it did" in said
    assert taken_up(tmp_path, "train.max_gradient_spike=null", without=("train.max_gradient_spike",)).step == STEP
    # One of which nobody has said what the program did without it.
    said = refusal(lambda: taken_up(tmp_path, without=("model.norm",)))
    assert "model.norm is 'group', and the version of Samerun" in said
    assert "no value of it is the same as none" in said
    said = refusal(lambda: taken_up(tmp_path, and_with={"optim.later": 0.5}))
    assert "optim.later was 0.5, and this version of Samerun has no such key" in said


def test_another_length_says_what_it_does_to_the_learning_rates(tmp_path: Path) -> None:
    note = taken_up(tmp_path, "train.epochs=20").note
    # Half of the cosine was done, which is now a quarter.
    assert note == (
        "the run is 440 steps long now (train.epochs=20) and was 220 (train.epochs=10): under optim.schedule=cosine that moves "
        "every learning rate from step 111 on, where it is 0.08536 and would have been 0.05"
    )
    assert taken_up(tmp_path, "train.epochs=null", "train.steps=220").note is None
    constant = {"optim.schedule": "constant"}
    assert taken_up(tmp_path, "train.epochs=20", "optim.schedule=constant", and_with=constant).note is None
    # The rates of the warm-up are as they were.
    warm = taken_up(tmp_path, "train.epochs=20", "optim.warmup_steps=200", and_with={"optim.warmup_steps": 200}).note
    assert warm is not None
    assert "from step 202 on" in warm


def test_a_run_that_is_over_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    said = refusal(lambda: taken_up(tmp_path, "train.epochs=null", "train.steps=5"))
    assert "has 110 steps done, and this run is to have 5 (train.steps=5): no step is left to take" in said
    assert "Give train.steps=110 or more" in said
    assert taken_up(tmp_path, "train.epochs=null", "train.steps=110").step == STEP


@pytest.mark.multiproc
def test_a_real_run_says_so_and_leaves_the_folder_as_it_was(digits_run: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(digits_run, tmp_path / "run"))
    ran = ("--recipe", "digits", "train.global_batch_size=64", "log.every_steps=5", "--resume", "auto")
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    finished = train("cpu", run_dir, *ran, "train.steps=5")
    assert finished.returncode != 0
    assert "has 44 steps done, and this run is to have 5 (train.steps=5)" in finished.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == files
    finished = train("cpu", run_dir, *ran, "train.steps=50").check()
    assert "note: the run is 50 steps long now (train.steps=50) and was 44 (train.epochs=2)" in finished.output
    assert read_lines(run_dir / "metrics.jsonl")[-1]["step"] == 50
