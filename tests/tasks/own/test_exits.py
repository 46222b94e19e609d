"""A task file that ends the program is no run: it is named, with its line, and the exit code is not 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Started, run

from app.errors import RecipeError, TrainingError

TASK = """
import argparse
import os
import sys

import torch
from torch import nn

from app.task import Loss, Samples


class Task:
    def samples(self, split):
        return Samples.of({{"x": torch.randn(64, 2)}}) if split == "train" else None

    def model(self, metadata):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        loss = model(batch["x"]).square().mean()
        {in_loss}
        return Loss(loss, len(batch["x"]))


task = Task
{at_end}
"""
GUARD = "guard what only a script does with `if __name__ == '__main__':`"


def written(folder: Path, *, in_loss: str = "pass", at_end: str = "") -> list[str]:
    folder.joinpath("script.py").write_text(TASK.format(in_loss=in_loss, at_end=at_end))
    recipe = folder / "script.yaml"
    recipe.write_text("task: script.py\ntrain: {global_batch_size: 16, steps: 2}\n")
    return ["--recipe", str(recipe), "--run-dir", str(folder / "run"), "--trackers", "none"]


@pytest.mark.parametrize(
    ("where", "exit_and_line", "words", "processes"),
    [
        ({"at_end": "argparse.ArgumentParser().parse_args(['--lr', '1'])"}, "sys.exit(2) in line 26", GUARD, 1),
        ({"in_loss": "sys.exit(0)"}, "sys.exit(0) in line 21", "raise an exception instead", 2),
    ],
    ids=["argparse", "in the loss"],
)
def test_a_task_file_that_exits_is_named(
    where: dict[str, str], exit_and_line: str, words: str, processes: int, tmp_path: Path
) -> None:
    ended = run("cpu" if processes == 1 else "multi_gpu", processes, "app.train", *written(tmp_path, **where))
    assert ended.returncode == RecipeError.exit_code, ended.output
    said = f"RecipeError: script.py ends the program with {exit_and_line} ({tmp_path / 'script.py'}): {words}"
    assert said in ended.output


def test_a_process_that_vanishes_with_exit_code_0_has_not_finished(tmp_path: Path) -> None:
    words = written(tmp_path, in_loss="os._exit(0)")
    ended = Started(["samerun", "launch", "--preset", "cpu", *words]).wait()
    assert ended.returncode == TrainingError.exit_code, ended.output
    assert "the training process ended with exit code 0, but it neither finished the run nor stopped it" in ended.output
