"""A run that fails is recorded as failed, with its process, exit code and error; a task file that exits is no run."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from processes import Finished, Started, run

from app.errors import RecipeError, TrainingError
from app.reports import past_run, report
from app.reports.past_run import state_of

pytestmark = pytest.mark.multiproc

# The last rank alone fails, once the run folder is claimed. Others wait for it in a collective.
TASK = """
import argparse
import os
import signal
import sys

import torch
from torch import nn

from app.task import Loss, Samples

FAILS, RUN = os.environ.get("FAILS"), os.environ["RUN"]
IS_LAST = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


class Task:
    def samples(self, split):
        if FAILS == "early":
            raise ValueError("no samples")
        return Samples.of({"x": torch.ones(64, 2)}) if split == "train" else None

    def model(self, metadata):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        loss = model(batch["x"]).square().mean()
        if FAILS == "exits":
            sys.exit(0)
        if FAILS == "vanishes":
            os._exit(0)
        if IS_LAST and os.path.exists(f"{RUN}/metrics.jsonl"):
            if FAILS == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if FAILS == "raises":
                raise ValueError("struck")
        return Loss(loss, len(batch["x"]))


task = Task
if FAILS == "parses":
    argparse.ArgumentParser().parse_args(["--lr", "1"])
"""
ONE, TWO = ("--preset", "cpu"), ("--preset", "multi_gpu", "--processes", "2")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "task.py").write_text(TASK)
    recipe = tmp_path / "task.yaml"
    recipe.write_text("task: task.py\ntrain: {global_batch_size: 16, steps: 2}\n")
    return ["--recipe", str(recipe), "--run-dir", str(tmp_path / "run"), "--trackers", "none"]


def launch(words: list[str], fails: str, *preset: str) -> Finished:
    return Started(["samerun", "launch", *preset, *words], env={"FAILS": fails, "RUN": words[3]}).wait()


def state(words: list[str], rank: int) -> tuple[str, str]:
    found = state_of(past_run.read(Path(words[3])), time.time())
    return found.word, found.sentence.replace(f"rank {rank} on {socket.gethostname()} ", "it ")


@pytest.mark.slow
def test_the_state_is_that_of_the_newest_start(words: list[str]) -> None:
    ended = launch(words, "early", *ONE)
    last = ["ValueError: no samples", "Task.samples in task.py failed for 'train'"]
    assert (ended.returncode, ended.output.splitlines()[-2:]) == (1, last)
    assert f'File "{Path(__file__).parents[2]}' not in ended.output  # none of our frames
    assert not Path(words[3]).exists()

    ended = launch(words, "raises", *TWO)
    where = "Task.loss in task.py failed on a training batch (x float32 [8, 2])"
    last = [f"[rank 1 on {socket.gethostname()}] {line}" for line in ("ValueError: struck", where)]
    assert (ended.returncode, ended.output.splitlines()[-2:]) == (1, last)
    failed = ("failed", f"it ended with exit code 1: ValueError: struck. {where}")
    assert state(words, 1) == failed
    page, complaints = report.render(past_run.read(Path(words[3])), time.time())
    assert complaints == []
    assert "failed</span>" in page

    launch(words, "early", *ONE)  # it did not claim the folder
    assert state(words, 1) == failed
    assert launch(words, "", *ONE).returncode == 0
    assert state(words, 1) == ("finished", "all steps are done")


def test_a_killed_process_is_recorded_by_its_launcher(words: list[str]) -> None:
    assert launch(words, "killed", *TWO).returncode == 137
    assert state(words, 1) == ("failed", "it was ended by SIGKILL, possibly out of memory")


def test_without_a_launcher_of_ours_a_process_records_its_error(words: list[str]) -> None:
    ended = run("cpu", None, "app.train", *words, env={"FAILS": "raises", "RUN": words[3]})
    assert ended.returncode == 1, ended.output
    where = "Task.loss in task.py failed on a training batch (x float32 [16, 2])"
    assert state(words, 0) == ("failed", f"it ended with exit code 1: ValueError: struck. {where}")


@pytest.mark.parametrize(("fails", "preset", "code"), [("parses", "cpu", 2), ("exits", "multi_gpu", 0)])
def test_a_task_file_that_exits_is_named(words: list[str], fails: str, preset: str, code: int) -> None:
    ended = run(preset, 1 if preset == "cpu" else 2, "app.train", *words, env={"FAILS": fails, "RUN": words[3]})
    assert ended.returncode == RecipeError.exit_code, ended.output
    line = TASK[: TASK.index(f'"{fails}"')].count("\n") + 2
    file = Path(words[1]).with_suffix(".py")
    expected = f"RecipeError: task.py ends the program with sys.exit({code}) in line {line} ({file}): raise an exception"
    assert expected in ended.output


def test_a_process_that_vanishes_with_exit_code_0_has_not_finished(words: list[str]) -> None:
    ended = launch(words, "vanishes", *ONE)
    assert ended.returncode == TrainingError.exit_code, ended.output
    assert "the training process ended with exit code 0, but it neither finished the run nor stopped it" in ended.output
