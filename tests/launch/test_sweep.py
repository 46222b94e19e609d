"""`samerun sweep`: what is checked before the first run, and real runs, interrupted, failed and gone on with."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import Started, clean_environment, read, read_lines
from refusals import Refused

from app.errors import STOPPED, TrainingError, UsageError
from app.recipe import recipe_file
from launch.cases import sweep

SMALL = ("--processes", "1", "--trackers", "none", "train.steps=600", "log.every_steps=10", "checkpoint.every_steps=20")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("optim.lr=1e-3", "no key has several values in 'optim.lr=1e-3': separate values by commas"),
        ("seed=1,2 seed=3", "seed is given by the sweep and by seed=...: remove one of them"),
        ("seed=1,2 --no-such-option", "--no-such-option: unknown option"),
        ("optim.lr=1e-3,-3e-3 seed=1,x train.epochs=x --preset cpu",
         "train.epochs is x (command line): expected a whole number or null\n"
         "seed is x (command line): expected a whole number (optim.lr=1e-3 seed=x; optim.lr=-3e-3 seed=x)\n"
         "optim.lr is -0.003: it must be at least 0 (command line) (optim.lr=-3e-3 seed=1; optim.lr=-3e-3 seed=x)"),
    ],
)  # fmt: skip
def test_all_combinations_are_checked_before_the_first_run(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    refused(["samerun", "sweep", *words.split()], sentence, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_each_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["optim.lr=1e-3,3e-3;seed=1", "--dry-run", "--run-dir", "my runs", "--preset", "cpu"]  # as of an array
    assert sweep(words, clean_environment(), say=print) == 0
    first, second = (shlex.split(line) for line in capsys.readouterr().out.splitlines())
    assert {"my runs/lr=1e-3-seed=1", "optim.lr=1e-3", "seed=1"} <= set(first)
    assert set(second) - set(first) == {"my runs/lr=3e-3-seed=1", "optim.lr=3e-3"}
    assert not list(tmp_path.iterdir())


def test_a_finished_run_of_another_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        folder = tmp_path / "all" / f"seed={seed}"
        folder.mkdir(parents=True)
        kept = recipe_file.load("digits", [f"seed={seed}", "train.epochs=3", "log.every_steps=7"]).recipe
        (folder / "recipe.yaml").write_text(recipe_file.to_yaml(kept))
        (folder / "result.json").write_text("{}")
    refusal = "all/seed=2 holds a finished run of another recipe, train.epochs is 3 there and 4 here: choose another"
    with pytest.raises(UsageError, match=refusal):
        sweep(["seed=1,2", "--run-dir", "all", "train.epochs=4"], clean_environment(), say=print)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_sweep_is_interrupted_goes_on_and_outlives_a_run_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "sweep", "optim.lr=0.003,1e30", *SMALL]
    good, bad = (tmp_path / "runs/digits-sweep" / f"lr={rate}" for rate in ("0.003", "1e30"))
    started = Started(command, cwd=tmp_path)
    while not (good / "metrics.jsonl").exists() or not read_lines(good / "metrics.jsonl"):
        assert not started.is_over()
        time.sleep(0.05)
    os.kill(started.processes()[0].pid, signal.SIGINT)
    stopped = started.wait()
    assert stopped.returncode == STOPPED, stopped.output
    assert "\nsamerun: stopped, with 0 of 2 runs finished. To continue: samerun sweep " in stopped.output
    assert not bad.exists()

    gone_on = Started(command, cwd=tmp_path).wait()
    assert gone_on.returncode == TrainingError.exit_code, gone_on.output
    assert "resumed from" in gone_on.output
    assert read(good / "result.json")["steps"] == 600
    assert not (bad / "result.json").exists()
    assert "1 of 2 runs failed: optim.lr=1e30 (exit code 8). The same command runs these again" in gone_on.output
    assert "1e+30" in gone_on.output[gone_on.output.index("optim.lr") :]  # the table
    assert (tmp_path / "runs/digits-sweep/curves.pdf").exists()

    third = Started(command, cwd=tmp_path).wait()
    assert f"run 1 of 2, optim.lr=0.003: finished already, {good.relative_to(tmp_path)}" in third.output
    assert third.returncode == TrainingError.exit_code
