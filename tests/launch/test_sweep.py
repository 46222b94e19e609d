"""`samerun sweep`: what is checked before the first run, and real runs, interrupted, failed and gone on with."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import Finished, Started, clean_environment, read, read_lines

from app.errors import STOPPED, SamerunError, TrainingError, UsageError
from app.recipe import recipe_file
from launch.cases import sweep

SMALL = ("--processes", "1", "--trackers", "none", "train.steps=600", "log.every_steps=10", "checkpoint.every_steps=20")


def said_by(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What is wrong with a sweep, of which nothing has begun."""
    monkeypatch.chdir(folder)
    with pytest.raises(SamerunError) as caught:
        sweep([*words], clean_environment(), say=lambda _: None)
    assert (type(caught.value), list(folder.glob("runs/*"))) == (UsageError, [])
    return str(caught.value)


def test_all_combinations_are_checked_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by(tmp_path, monkeypatch, "optim.lr=1e-3,-3e-3", "seed=1,x", "train.epochs=x", "--preset", "cpu")
    assert said.splitlines() == [
        "train.epochs is x (command line): expected a whole number or null",
        "seed is x (command line): expected a whole number (optim.lr=1e-3 seed=x; optim.lr=-3e-3 seed=x)",
        "optim.lr is -0.003: it must be at least 0 (command line) (optim.lr=-3e-3 seed=1; optim.lr=-3e-3 seed=x)",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optim.lr=1e-3"], "no key has several values: give one, such as optim.lr=1e-3,3e-3"),
        (["seed=1,2", "seed=3"], "seed is given by the sweep and by seed=...: remove one of them"),
        (["seed=1,2", "--no-such-option"], "--no-such-option: unknown option"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str) -> None:
    assert expected in said_by(tmp_path, monkeypatch, *words)


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
    with pytest.raises(UsageError) as caught:
        sweep(["seed=1,2", "--run-dir", "all", "train.epochs=4"], clean_environment(), say=print)
    assert "all/seed=2 holds a finished run of another recipe, train.epochs is 3 there and 4 here: choose another" in str(
        caught.value
    )


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
    assert stopped.output.splitlines()[-1].startswith(
        "samerun: stopped, with 0 of 2 runs finished. To continue: samerun sweep "
    )
    assert 0 < read(good / "outcome.json")["step"] < 600
    assert not bad.exists()

    def again() -> Finished:
        done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False)
        return Finished(done.returncode, done.stdout + done.stderr)

    gone_on = again()
    assert gone_on.returncode == TrainingError.exit_code, gone_on.output
    assert "resumed from" in gone_on.output
    assert read(good / "result.json")["steps"] == 600
    assert not (bad / "result.json").exists()
    assert "1 of 2 runs failed: optim.lr=1e30 (exit code 8). The same command runs these again" in gone_on.output
    table = gone_on.output[gone_on.output.index("optim.lr") :]
    assert "0.003" in table
    assert "1e+30" in table
    for ending in ("pdf", "png"):
        assert f"runs/digits-sweep/curves.{ending}\n" in gone_on.output
        assert (tmp_path / f"runs/digits-sweep/curves.{ending}").exists()

    third = again()
    assert f"run 1 of 2, optim.lr=0.003: finished already, {good.relative_to(tmp_path)}" in third.output
    assert third.returncode == TrainingError.exit_code
