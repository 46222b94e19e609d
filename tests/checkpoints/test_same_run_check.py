"""Which checkpoints a run can resume from, and the sentences about the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import last_of_each, train
from saved import piece, refusal, save

from app.checkpoints import step_folders
from app.checkpoints.checkpoint import Resumed, check_same_run
from app.optim.schedule import length_in_steps
from app.recipe import recipe_file

DATA = {"training data": "1438 samples, abc", "test data": "359 samples, def"}
RECIPE = ("train.global_batch_size=64", "train.epochs=10", "optim.lr=0.1", "optim.warmup_steps=0")
STEP = 110
GROUPS = {"head.*": {"lr_factor": 2.0}, "*": {"lr_factor": 3.0}}


def check(run_dir: Path, *overrides: str, without: tuple[str, ...] = (), before: Mapping[str, Any] | None = None) -> Resumed:
    """Check a run with these overrides against a checkpoint whose recipe had the values `before`."""
    values = recipe_file.flat(recipe_file.load("digits", RECIPE).recipe) | (before or {})
    values = {key: value for key, value in values.items() if key not in without}
    folder = save(run_dir, STEP, [piece(torch.arange(12.0))], state={"step": STEP, "recipe": values, "data": DATA})
    recipe = recipe_file.load("digits", last_of_each([*RECIPE, *overrides])).recipe
    length = length_in_steps(recipe.train, dataset_size=1438, global_batch_size=64)
    return check_same_run(folder, recipe, DATA, length, sources={})


@pytest.mark.parametrize(
    ("overrides", "before", "words"),
    [
        (("seed=3", "augment.flip=0.5", "data.path=here", "log.every_steps=3"), {},
         "another run or another version of Samerun: seed was 0 and is 3, augment.flip was 0.0 and is 0.5. Undo these changes"),
        ((), {"task": "other"}, "task was 'other'"),
        ((f"train.init_from=hub:o/n@v2:{'b' * 40}",), {"train.init_from": f"hub:o/n@main:{'a' * 40}"},
         f"train.init_from was 'hub:o/n@main:{'a' * 40}' and is 'hub:o/n@v2:{'b' * 40}'"),
        ((), {"optim.later": 0.5}, "optim.later was 0.5 and is 'no such key'"),
        ((f"optim.groups={GROUPS}",), {"optim.groups": dict(reversed(GROUPS.items()))},  # the first match counts
         "optim.groups was {'*': {'lr_factor': 3.0}, 'head.*'"),
        (("train.epochs=null", "train.steps=5"), {},
         "is at step 110, and this run has only 5 steps: give train.steps=110 or more"),
        (("train.skip_steps=[[110,112]]",), {"train.skip_steps": [[111, 112]]},
         "is at step 110, and train.skip_steps was [[111, 112]] and is [[110, 112]], which differ in steps that were taken"),
    ],
)  # fmt: skip
def test_another_run_is_refused(tmp_path: Path, overrides: tuple[str, ...], before: dict[str, Any], words: str) -> None:
    assert words in refusal(lambda: check(tmp_path, *overrides, before=before))


def test_a_key_that_a_checkpoint_lacks_had_its_default(tmp_path: Path) -> None:
    assert check(tmp_path, without=("augment.flip",)).step == STEP
    words = "augment.flip was 0.0 and is 0.5"
    assert words in refusal(lambda: check(tmp_path, "augment.flip=0.5", without=("augment.flip",)))


def test_keys_that_do_not_affect_training_and_the_length_can_differ(tmp_path: Path) -> None:
    older = ("train.deterministic", "checkpoint.every_minutes", "data.stage_to")
    same = Resumed(step_folders.path_of(tmp_path, STEP), STEP, None)
    assert check(tmp_path, without=older) == same
    assert check(tmp_path, f"optim.groups={GROUPS}", before={"optim.groups": GROUPS}) == same
    assert check(tmp_path, "train.epochs=null", "train.steps=220") == same
    skipping = ("train.skip_steps=[[90,112],[120,130]]",)
    assert check(tmp_path, *skipping, before={"train.skip_steps": [[90, 115]]}) == same
    assert check(tmp_path, "train.skip_steps=[[111,112]]", without=("train.skip_steps",)) == same
    assert check(tmp_path, before={"optim.cosine_steps": None}, without=("optim.schedule_steps",)) == same


CONSTANT, WARM = {"optim.schedule": "constant"}, {"optim.warmup_steps": 200}
WSD = {"optim.schedule": "wsd", "optim.decay_steps": 60}  # from step 161 of 220 on
LONGER = "the run is 440 steps long instead of 220"


@pytest.mark.parametrize(
    ("before", "overrides", "note"),
    [
        (CONSTANT, {"train.epochs": 20}, f"{LONGER}, which changes no learning rate"),
        (WSD, {"train.epochs": 20}, f"{LONGER}, which changes learning rates from step 162 on"),
        (WARM, {"train.epochs": 20}, f"{LONGER}, which changes learning rates from step 202 on"),
        ({}, {"train.epochs": 20}, f"{LONGER}: under optim.schedule=cosine this changes all learning rates from step 111 on "
         "(optim.schedule_steps=220 keeps them)"),
        ({}, {"train.epochs": 20, "optim.schedule_steps": 220},
         f"{LONGER}, optim.schedule_steps was None and is 220, which changes no learning rate"),
        (CONSTANT, {"optim.schedule": "wsd", "optim.decay_steps": 110},
         "optim.decay_steps was None and is 110, optim.schedule was 'constant' and is 'wsd', which changes learning rates "
         "from step 112 on"),
    ],
)  # fmt: skip
def test_another_length_or_schedule_is_noted(
    tmp_path: Path, before: dict[str, Any], overrides: dict[str, Any], note: str
) -> None:
    words = (f"{key}={value}" for key, value in {**before, **overrides}.items())
    assert check(tmp_path, *words, before=before).note == note


@pytest.mark.parametrize(
    ("before", "overrides", "words"),
    [
        ({}, {"optim.warmup_steps": 5},
         "is at step 110, and optim.warmup_steps was 0 and is 5, which changes the learning rate of step 1, a step taken "
         "already: undo the change."),
        (CONSTANT, {"optim.schedule": "wsd", "optim.decay_steps": 112}, "give --resume a checkpoint of step 109 or earlier"),
        ({**WSD, "optim.decay_steps": 150}, {"train.epochs": 20}, f"{LONGER}, which changes the learning rate of step 72, a "),
    ],
)  # fmt: skip
def test_another_rate_of_a_step_that_was_taken_is_refused(
    tmp_path: Path, before: dict[str, Any], overrides: dict[str, Any], words: str
) -> None:
    chosen = [f"{key}={value}" for key, value in {**before, **overrides}.items()]
    assert words in refusal(lambda: check(tmp_path, *chosen, before=before))


@pytest.mark.multiproc
def test_a_refused_start_leaves_the_folder_unchanged(digits_run: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(digits_run, tmp_path / "run"))
    chosen = ("--recipe", "digits", "train.global_batch_size=64", "log.every_steps=5", "--resume", "auto")
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    finished = train("cpu", run_dir, *chosen, "train.steps=5")
    assert finished.returncode != 0
    assert "is at step 40, and this run has only 5 steps" in finished.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == files
