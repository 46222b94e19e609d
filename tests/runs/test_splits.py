"""Validation is looked at while a run goes on, test is scored once: on any topology, over kills, and with splits missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from moments import await_that
from PIL import Image
from processes import read, read_lines, run, start, train

from app import export
from app.checkpoints import step_folders
from app.errors import RecipeError

pytestmark = pytest.mark.multiproc

# The rate rises until steps make things worse: the best evaluation is not the last.
RECIPE = ("--recipe", "digits", "train.steps=200", "train.global_batch_size=64", "log.every_steps=500", "log.samples=true",
          "optim.name=sgd", "optim.lr=1.5", "optim.schedule=constant", "optim.warmup_steps=110", "optim.warmup_epochs=null",
          "optim.clip_norm=null", "checkpoint.every_minutes=null", "checkpoint.keep_best=true", "checkpoint.keep_last=1",
          "train.evaluate_every_steps=5", "train.max_validation_samples=100",
          "train.stop_after_evaluations_without_gain=3")  # fmt: skip


def test_early_stopping_and_best_are_the_same_across_a_kill_and_presets(tmp_path: Path) -> None:
    alone, other = tmp_path / "alone", tmp_path / "other"
    finished = train("cpu", alone, *RECIPE).check()
    result = read(alone / "result.json")
    last = result["stopped_early_at_step"]
    assert (result["steps"], read(alone / "outcome.json")["outcome"], last % 5) == (last, "finished", 0)
    assert last < 200
    assert f"ends after step {last} of 200: 3 evaluations in a row did not improve the validation accuracy" in finished.output
    assert [line["step"] for line in read_lines(alone / "metrics.jsonl")] == [last]
    *looked_at, tested = read_lines(alone / "evaluations.jsonl")
    assert [line["step"] for line in looked_at] == [*range(5, last + 1, 5)]
    assert not [name for line in looked_at for name in line if name.startswith("test_")]
    assert (tested["step"], result["validation_samples"], result["test_samples"]) == (last, 100, 359)
    best = step_folders.Reader(step_folders.path_of(alone, last)).state["best"]["step"]
    assert best == last - 15
    assert step_folders.committed(alone) == [step_folders.path_of(alone, step) for step in (last, best)]
    assert export.main([str(alone), "--best"]) == 0
    (alone / "model.json").unlink()  # and of a run that is not finished
    score = next(line["validation_accuracy"] for line in looked_at if line["step"] == best)
    for evaluated in ((str(alone / "exported" / f"step-{best:08d}"),), (str(alone), "--best")):
        again = run("cpu", 1, "app.evaluate", *evaluated, "--json", "--split", "validation").check()
        assert json.loads(again.output.splitlines()[-1])["accuracy"] == pytest.approx(score), evaluated

    # Two evaluations without a gain are saved when it is killed under one preset; it goes on under the other.
    command = ("app.train", "--run-dir", str(other), "--trackers", "none")
    running = start("multi_gpu", 2, *command, *RECIPE, "checkpoint.every_steps=1", "train.max_micro_batch=16")
    await_that(running, lambda: step_folders.path_of(other, best).exists())
    await_that(running, lambda: step_folders.committed(other)[0] >= step_folders.path_of(other, best + 10))
    running.kill()
    assert not (other / "outcome.json").exists()
    train("fsdp2", other, *RECIPE, "--resume", "auto", processes=2).check()
    assert read(other / "result.json")["stopped_early_at_step"] == last
    assert {path.name for path in step_folders.committed(other)} >= {f"step-{step:08d}" for step in (last, best)}
    assert (other / "samples.jsonl").read_text() == (alone / "samples.jsonl").read_text()
    there = {line["step"]: line for line in read_lines(other / "evaluations.jsonl") if "validation_loss" in line}
    for line in looked_at[: best // 5]:  # later on the rate is so high that rounding grows
        assert there[line["step"]]["validation_loss"] == pytest.approx(line["validation_loss"], rel=1e-5)

    (other / "result.json").unlink()  # as if it had been killed after its last step
    refused = train("cpu", other, *RECIPE, "--resume", "auto", "train.evaluate_every_steps=4")
    assert "train.evaluate_every_steps was 5 and is 4" in refused.output
    finished = train("cpu", other, *RECIPE, "--resume", "auto").check()  # over already
    assert "; no steps were left" in finished.output
    assert read(other / "result.json")["stopped_early_at_step"] == last


def folder_of(path: Path, *places: str) -> Path:
    for number, place in enumerate(places):
        for label in ("dark", "light"):
            (path / place / label).mkdir(parents=True)
            for index in range(8):
                pixels = np.random.default_rng(100 * number + index).integers(0, 99, (8, 8, 3), np.uint8)
                Image.fromarray(pixels + 128 * (label == "light")).save(path / place / label / f"{index}.png")
    return path


def test_splits_that_are_not_there_have_no_scores(tmp_path: Path) -> None:
    recipe = ("--recipe", "imagefolder", "model.name=convnet", "data.image_size=8", "data.resize_size=null", "train.epochs=3",
              "train.global_batch_size=8", "optim.warmup_epochs=null")  # fmt: skip
    path = f"data.path={folder_of(tmp_path / 'validated', 'train', 'valid')}"
    finished = train("cpu", tmp_path / "run", *recipe, path).check()
    assert "16 training samples, 2 steps an epoch, 6 steps; 16 validation samples" in finished.output
    result, lines = read(tmp_path / "run/result.json"), read_lines(tmp_path / "run/evaluations.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert result["validation_samples"] == 16
    assert not [name for told in (result, *lines) for name in told if name.startswith("test")]
    assert (tmp_path / "run/validation_predictions/predictions.json").exists()
    assert not (tmp_path / "run/test_predictions").exists()

    path = f"data.path={folder_of(tmp_path / 'flat', '.')}"
    finished = train("cpu", tmp_path / "unscored", *recipe, path).check()
    assert "nothing to score the weights on" in finished.output
    assert not (tmp_path / "unscored/evaluations.jsonl").exists()
    assert read(tmp_path / "unscored/result.json")["steps"] == 6
    refused = train("cpu", tmp_path / "refused", *recipe, path, "checkpoint.keep_best=true")
    assert refused.returncode == RecipeError.exit_code
    assert "checkpoint.keep_best=true needs validation scores, and the data has no validation split" in refused.output
    train("cpu", tmp_path / "held", *recipe, path, "train.validation_fraction=0.25", "train.global_batch_size=4").check()
    assert read(tmp_path / "held/result.json")["validation_samples"] == 4
