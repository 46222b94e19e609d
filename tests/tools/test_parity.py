"""`samerun parity`: which cases run, what counts as the same, what explains a difference, and --quick with real runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Started
from rule_breaker import TASK

from app.errors import PresetError, RecipeError, RunFolderError
from app.recipe.recipe_file import load
from app.reports import past_run
from app.reports.compare import Comparison, compare, relative_difference
from app.tools.parity import Variant, case_of, quick_batch, report, run_of
from launch.cases import RunCase

# Losses and runs -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("metrics.jsonl", lambda text: text, "has losses of 8 steps, where steps 1 to 40 were asked for"),
        ("run.json", lambda text: text.replace('"world_size": 1', '"world_size": 2'), "'world_size': 2"),
        ("metrics.jsonl", lambda text: text[:-9], "damaged or truncated"),
    ],
)
def test_a_run_that_is_not_whole_or_not_as_asked_is_not_compared(
    digits_run: Path, tmp_path: Path, name: str, change: Any, words: str
) -> None:
    folder = Path(shutil.copytree(digits_run, tmp_path / "run"))
    about = folder / "run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "preset": "cpu"}))
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(RunFolderError) as caught:
        run_of(RunCase("", folder, []), Variant("cpu", 1, 1), steps=40)
    assert words in str(caught.value)


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
    ("preset", "processes", "accumulation", "words"),
    [
        ("cpu", 2, 1, "cpu"),
        ("multi_gpu", 5, 1, "12 samples (train.global_batch_size) cannot be divided by 5"),
        ("multi_gpu", 4, 1, "augment.mixup"),
    ],
)
def test_a_case_that_cannot_run_says_why(preset: str, processes: int, accumulation: int, words: str) -> None:
    reason = planned(preset, processes, accumulation, "train.global_batch_size=12", "augment.mixup=0.2")
    assert isinstance(reason, str)
    assert words in reason


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
    return replace(found, losses=losses, fed=replace(found.fed, samples_differ_at=samples_at))


@pytest.mark.parametrize(
    ("floor", "reason"),
    [(4e-5, "the floor explains multi_gpu-2x1: "), (1e-7, "the floor does not explain multi_gpu-2x1, fsdp2-2x2: "),
     (None, "floor is unknown")],
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
    assert all(words in shown for words in ("1.5e-05", "differ at step 3", "different", "learning rates"))


# Real runs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.multiproc
def test_ctrl_c_ends_it_without_a_traceback_and_with_what_it_started() -> None:
    started = Started([sys.executable, "-m", "launch.cli", "parity"])
    parity = started.processes()[0]
    while len(started.processes()) == 1:
        time.sleep(0.1)
    group = [process for process in psutil.process_iter() if os.getpgid(process.pid) == parity.pid]
    os.killpg(parity.pid, signal.SIGINT)
    finished = started.wait()
    assert finished.returncode != 0
    assert "samerun: stopped, with 0 of 4 runs finished" in finished.output
    assert "Traceback" not in finished.output
    assert psutil.wait_procs(group, timeout=30)[1] == []


@pytest.fixture
def recipe(tmp_path: Path, own_imports: None) -> Path:
    (tmp_path / "table.py").write_text(TASK)
    (tmp_path / "table.yaml").write_text("task: table.py\ntrain: {global_batch_size: 16, steps: 6}\nlog: {every_steps: 1}\n")
    return tmp_path / "table.yaml"


def examined(recipe: Path, *words: str) -> tuple[int, str]:
    finished = Started([sys.executable, "-m", "launch.cli", "parity", "--quick", "--recipe", str(recipe), *words]).wait()
    return finished.returncode, finished.output


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_task_that_keeps_the_rules_passes(recipe: Path, tmp_path: Path) -> None:
    code, said = examined(recipe, "--keep", str(tmp_path / "kept"))
    assert code == 0, said
    assert "floor: one process differs from itself by " in said
    runs = sorted(json.loads(path.read_text())["steps"] for path in (tmp_path / "kept").glob("*/result.json"))
    assert runs == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("rank", "the floor does not explain multi_gpu-2x1: something there depends on the topology, such as the rank"),
        ("a mean of means", "breaks a rule (loss): the loss of a batch is "),
        ("unused parameter", "2 trainable parameters have no gradient after the first step's backward passes: extra.weight, "),
    ],
)
def test_each_broken_rule_is_named(recipe: Path, broken: str, words: str) -> None:
    code, said = examined(recipe, f"rule.broken={broken}")
    assert code == 1, said
    assert words in said
