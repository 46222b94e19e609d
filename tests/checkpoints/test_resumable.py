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
    return check_same_run(
        folder, recipe, DATA, length_in_steps(recipe.train, dataset_size=1438, global_batch_size=64), sources={}
    )


def test_a_checkpoint_of_other_keys_is_of_another_version(tmp_path: Path) -> None:
    deciding = "only one of the two has the recipe keys"
    said = refusal(lambda: taken_up(tmp_path, without=("task", "train.dtype"), and_with={"model.dtype": "float32"}))
    assert f"was written by another version of Samerun: {deciding} model.dtype, task, train.dtype. Finish the run with" in said
    assert "or start a new run in another --run-dir" in said
    assert f"{deciding} optim.later" in refusal(lambda: taken_up(tmp_path, and_with={"optim.later": 0.5}))
    # These decide nothing of what is learnt.
    older = ("train.deterministic", "checkpoint.every_minutes", "data.stage_to")
    assert taken_up(tmp_path, without=older) == Resumed(step_folders.path_of(tmp_path, STEP), STEP, None)


def test_another_run_is_named_by_what_differs(tmp_path: Path) -> None:
    said = refusal(lambda: taken_up(tmp_path, "augment.flip=0.5", "seed=3", "data.path=elsewhere", "log.every_steps=3"))
    assert "belongs to another run: seed was 0 and is 3; augment.flip was 0.0 and is 0.5. Undo these changes" in said
    assert "belongs to another run: task was 'other'" in refusal(lambda: taken_up(tmp_path, and_with={"task": "other"}))
    groups = {"head.*": {"lr_factor": 2.0}, "*": {"lr_factor": 3.0}}  # the first match counts
    assert taken_up(tmp_path, f"optim.groups={groups}", and_with={"optim.groups": groups}).note is None
    reversed_groups = dict(reversed(groups.items()))
    said = refusal(lambda: taken_up(tmp_path, f"optim.groups={groups}", and_with={"optim.groups": reversed_groups}))
    assert "belongs to another run: optim.groups was {'*': {'lr_factor': 3.0}, 'head.*'" in said
    said = refusal(lambda: taken_up(tmp_path, f"optim.groups={groups}", and_with={"optim.groups": ["head.* lr_factor=2"]}))
    assert "belongs to another run: optim.groups was ['head.* lr_factor=2'] and is {'head.*'" in said


def test_another_length_says_what_it_does_to_the_learning_rates(tmp_path: Path) -> None:
    note = taken_up(tmp_path, "train.epochs=20").note
    # Half of the cosine was done, which is now a quarter.
    assert note == (
        "the run is 440 steps long (train.epochs=20) instead of 220 (train.epochs=10): under "
        "optim.schedule=cosine this changes "
        "all learning rates from step 111 on, where it is 0.08536 instead of 0.05"
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
    assert "is at step 110, and this run has 5 steps (train.steps=5): no step is left" in said
    assert "Give train.steps=110 or more" in said
    assert taken_up(tmp_path, "train.epochs=null", "train.steps=110").step == STEP


@pytest.mark.multiproc
def test_a_real_run_says_so_and_leaves_the_folder_as_it_was(digits_run: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(digits_run, tmp_path / "run"))
    ran = ("--recipe", "digits", "train.global_batch_size=64", "log.every_steps=5", "--resume", "auto")
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    finished = train("cpu", run_dir, *ran, "train.steps=5")
    assert finished.returncode != 0
    assert "is at step 40, and this run has 5 steps (train.steps=5)" in finished.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == files
    finished = train("cpu", run_dir, *ran, "train.steps=50").check()
    assert "note: the run is 50 steps long (train.steps=50) instead of 40 (train.epochs=2)" in finished.output
    assert read_lines(run_dir / "metrics.jsonl")[-1]["step"] == 50
