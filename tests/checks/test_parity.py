"""`samerun parity`: which cases run, what counts as the same, what explains a difference, and --quick with real runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Started
from rule_breaker import TASK

from app.checks.parity import Variant, case_of, quick_batch, report, run_of
from app.errors import PresetError, RecipeError, RunFolderError
from app.recipe.recipe_file import load
from app.reports import past_run
from app.reports.compare import Comparison, compare, relative_difference
from launch.cases import RunCase


def test_losses_that_are_not_finite_differ_and_zero_is_compared() -> None:
    pairs = [(2.0, 3.0), (0.0, 0.0), (0.0, 1e-12), (math.nan, math.nan), (1.0, math.inf)]
    assert [relative_difference(*pair) for pair in pairs] == [0.5, 0.0, *[math.inf] * 3]


@pytest.mark.parametrize(
    ("step", "difference", "same"), [(20, 9e-6, True), (20, 2e-5, False), (25, 2e-5, True), (25, 2e-4, False)]
)
def test_the_first_twenty_steps_have_the_smaller_tolerance(digits_run: Path, step: int, difference: float, same: bool) -> None:
    run = past_run.read(digits_run)
    lines = [{**line, "loss": line["loss"] * (1 + difference * (line["step"] == step))} for line in run.metrics]
    assert compare(run, replace(run, metrics=lines)).is_same is same


def test_a_run_that_is_not_as_asked_is_not_compared(digits_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    about = json.loads((folder / "run.json").read_text()) | {"preset": "cpu"}
    for processes, words in ((2, "'world_size': 2"), (1, "has losses of 8 steps, where steps 1 to 40 were requested")):
        (folder / "run.json").write_text(json.dumps({**about, "world_size": processes}))
        with pytest.raises(RunFolderError, match=words):
            run_of(RunCase("", folder, []), Variant("cpu", 1, 1), steps=40)


# Cases -----------------------------------------------------------------------------------------------------------------------


def planned(preset: str, processes: int, accumulation: int, *overrides: str) -> RunCase | str:
    options = argparse.Namespace(recipe="digits", steps=3, overrides=list(overrides))
    recipe = load("digits", overrides).recipe
    return case_of(Variant(preset, processes, accumulation), recipe, options, Path("cases", preset), dict(os.environ))


def test_each_case_divides_the_global_batch() -> None:
    case = planned("multi_gpu", 2, 3, "train.global_batch_size=12")
    assert isinstance(case, RunCase)
    assert "train.max_micro_batch=2" in case.argv
    with pytest.raises(PresetError, match="fsdp2"):
        planned("fsdp", 1, 1)


@pytest.mark.parametrize(
    ("preset", "processes", "words"),
    [
        ("cpu", 2, "cpu"),
        ("multi_gpu", 5, "12 samples (train.global_batch_size) cannot be divided by 5"),
        ("multi_gpu", 4, "augment.mixup"),
    ],
)
def test_a_case_that_cannot_run_has_a_reason(preset: str, processes: int, words: str) -> None:
    assert words in str(planned(preset, processes, 1, "train.global_batch_size=12", "augment.mixup=0.2"))


def test_the_batch_can_be_halved_and_neighbours_stay_together() -> None:
    assert quick_batch("digits", []) == 32
    assert quick_batch("digits", ["train.global_batch_size=6"]) == 6
    with pytest.raises(RecipeError, match="needs a multiple of 4, to compare halves"):
        quick_batch("digits", ["train.global_batch_size=6", "augment.mixup=0.2"])


# The report ------------------------------------------------------------------------------------------------------------------

NEAR, FAR = Variant("multi_gpu", 2, 1), Variant("fsdp2", 2, 2)


def differing(run_dir: Path, largest: float, *, samples_at: int | None = None) -> Comparison:
    run = past_run.read(run_dir)
    found = compare(run, run)
    beyond = 5 if largest > 1e-5 else None
    losses = replace(found.losses, largest=largest, largest_at_step=5, first_beyond=beyond)
    return replace(found, losses=losses, samples_differ_at=samples_at)


@pytest.mark.parametrize(
    ("floor", "reason"),
    [(4e-5, "the noise floor explains multi_gpu-2x1: "), (1e-7, "the noise floor does not explain multi_gpu-2x1, fsdp2-2x2: "),
     (None, "noise floor: unknown")],
    ids=["as far", "far less", "failed"],
)  # fmt: skip
def test_a_difference_is_told_from_the_floor(
    digits_run: Path, capsys: pytest.CaptureFixture[str], floor: float | None, reason: str
) -> None:
    """Other samples are never explained by it, and the verdict stays what it is."""
    found = {NEAR: differing(digits_run, 1.5e-5), FAR: differing(digits_run, 0.0, samples_at=3)}
    assert report(found, "it failed" if floor is None else differing(digits_run, floor), steps=40) == 1
    shown = capsys.readouterr().out
    assert reason in shown
    assert ("fsdp2-2x2: something" in shown) == (floor is not None)
    assert all(words in shown for words in ("1.5e-05", "step 3 is the first with different samples", "different"))


# Real runs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("nothing", "(one process compared with itself, two micro-batches per step)"),
        ("rank", "the noise floor does not explain multi_gpu-2x1: something depends on the topology, such as the rank"),
    ],
)
def test_quick_finds_a_difference_between_ranks(tmp_path: Path, broken: str, sentence: str) -> None:
    (tmp_path / "table.py").write_text(TASK)
    (tmp_path / "r.yaml").write_text("task: table.py\ntrain: {global_batch_size: 16, steps: 6}\nlog: {every_steps: 1}\n")
    words = ["--out", str(tmp_path / "kept"), "--recipe", str(tmp_path / "r.yaml"), f"rule.broken={broken}"]
    finished = Started([sys.executable, "-m", "launch.cli", "parity", "--quick", *words]).wait()
    assert finished.returncode == (broken != "nothing"), finished.output
    assert sentence in finished.output
    assert len(list((tmp_path / "kept").glob("*/result.json"))) == 3
