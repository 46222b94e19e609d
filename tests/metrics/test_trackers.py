"""Trackers have what the files of the run folder have, under the same names, as one run over all its starts."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import read, read_lines, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.checkpoints import step_folders
from app.metrics.trackers import Trackers, tag, tracked
from app.runs.claim import claim

pytestmark = pytest.mark.multiproc

# Epochs have 20 steps: evaluations after 20 and 24, pictures in steps 1 and 21.
RECIPE = ("--recipe", "digits", "train.global_batch_size=64", "log.every_steps=3", "checkpoint.every_steps=20",
          "augment.mixup=0.2")  # fmt: skip


SERVICES = ("wandb", "trackio", "mlflow")


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Continued:
    """A run of 24 steps with all trackers that are installed, which was killed and went on after step 20, to step 30."""

    run_dir: Path
    said: str
    """By the first start."""
    pictures: list[Any]
    """That TensorBoard had before the kill."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Continued:
    folder = tmp_path_factory.mktemp("tracked")
    # Nobody is known to wandb here, so it starts offline without asking its server.
    env = {"HOME": str(folder), "WANDB_API_KEY": "", "TRACKIO_DIR": str(folder / "trackio")}
    run_dir, recipe = folder / "run", ("--trackers", ",".join(["tensorboard", *filter(installed, SERVICES)]), *RECIPE)
    said = train("cpu", run_dir, *recipe, "train.steps=24", env=env).check().output
    pictures = shown(run_dir).Images("samples/augmented_batch")
    shutil.rmtree(step_folders.path_of(run_dir, 24))  # as a kill would have lost it
    train("multi_gpu", run_dir, "--resume", "auto", *recipe, "train.steps=30", processes=2, env=env).check()
    return Continued(run_dir, said, pictures)


def shown(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    return accumulator.Reload()


def numbers(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The curves of a file: step and value of each name."""
    names = {name for line in lines for name, value in line.items() if isinstance(value, (int, float))} - {"step", "time"}
    return {name: [(line["step"], line[name]) for line in lines if line.get(name) is not None] for name in names}


def test_tensorboard_has_the_files_of_the_run_folder_and_each_step_once(run: Continued) -> None:
    run_dir = run.run_dir
    board = shown(run_dir)
    metrics, evaluations = (numbers(read_lines(run_dir / f"{name}.jsonl")) for name in ("metrics", "evaluations"))
    assert [step for step, _ in metrics["loss"]] == [*range(3, 19, 3), *range(21, 31, 3)]
    assert [step for step, _ in evaluations["validation_accuracy"]] == [20, 30]
    assert [step for step, _ in evaluations["test_accuracy"]] == [30]
    curves = evaluations | metrics  # where a line was evaluated is said in evaluations.jsonl alone
    found = {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert {name for name, curve in found.items() if curve} == {tag(name) for name in curves}
    assert {
        "loss/train",
        "loss/validation",
        "validation/accuracy",
        "test/accuracy",
        "time/samples_per_s",
        "time/memory_bytes",
    } <= set(found)
    for name, curve in curves.items():
        assert found[tag(name)] == [(step, pytest.approx(value, rel=1e-6)) for step, value in curve], name

    pictures = board.Images("samples/augmented_batch")
    assert [picture.step for picture in pictures] == [picture.step for picture in run.pictures] == [1, 21]
    for picture, other in zip(pictures, run.pictures, strict=True):
        assert picture.encoded_image_string == other.encoded_image_string, "one process and two give the same pictures"

    page = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"adamw" in page
    charts = board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"loss/train" in charts
    assert b"loss/validation" in charts


@pytest.mark.skipif(not installed("wandb"), reason="needs wandb")
def test_wandb_without_a_key_writes_one_run_that_can_be_sent(run: Continued) -> None:
    assert run.said.count(f"`wandb sync {run.run_dir}/wandb/offline-*` sends the run") == 1
    identity = read(run.run_dir / "trackers.json")["wandb"]
    folders = list(run.run_dir.glob("wandb/offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [identity] * 2


@pytest.mark.skipif(not installed("trackio"), reason="needs trackio")
def test_trackio_has_one_run_of_all_starts(run: Continued) -> None:
    with closing(sqlite3.connect(run.run_dir.parent / "trackio" / "digits.db")) as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = store.execute("select config from configs").fetchall()
    assert {name for name, _, _ in rows} == {read(run.run_dir / "trackers.json")["trackio"]}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [step for step, metrics in found if "loss" in metrics] == [*range(3, 31, 3)]
    assert [step for step, metrics in found if "validation_accuracy" in metrics] == [20, 24, 30]
    assert json.loads(config)["train.steps"] == 30


@pytest.mark.skipif(not installed("mlflow"), reason="needs mlflow")
def test_mlflow_has_one_run_of_all_starts_in_the_run_folder(run: Continued) -> None:
    with closing(sqlite3.connect(run.run_dir / "mlflow.db")) as store:
        ((name, status),) = store.execute("select name, status from runs").fetchall()
        metrics = store.execute("select key, step from metrics order by step").fetchall()
        settings = dict(store.execute("select key, value from params").fetchall())
    assert (name, status, settings["optim.name"]) == ("run", "FINISHED", "adamw")
    assert [step for key, step in metrics if key == "loss"] == [*range(3, 31, 3)]
    assert [step for key, step in metrics if key == "validation_accuracy"] == [20, 24, 30]


def test_a_run_that_begins_again_is_a_new_one_to_its_trackers(tmp_path: Path) -> None:
    tracked(claim(tmp_path), project="digits", first_step=0, logged={}).remember("wandb", "3f9a")
    assert tracked(claim(tmp_path), project="digits", first_step=20, logged={}).known == {"wandb": "3f9a"}
    assert tracked(claim(tmp_path), project="digits", first_step=0, logged={}).known == {}


def test_a_tracker_that_fails_later_is_switched_off_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
    run = tracked(claim(tmp_path), project="digits", first_step=0, logged={})
    trackers = Trackers()
    trackers.start(["tensorboard"], run, {"seed": 0})
    trackers.log("metrics.jsonl", {"loss": 2.0}, step=1)
    assert capsys.readouterr().out == ""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # what a full disk does: no file gets longer
    try:
        trackers.log("metrics.jsonl", {"loss": 1.0}, step=2)
        trackers.log("metrics.jsonl", {"loss": 1.0}, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().out
    assert said.count("the tracker tensorboard is switched off, because it failed (RunFolderError: ") == 1
    assert "cannot be written: File too large" in said
    trackers.finish()
    assert [event.step for event in shown(tmp_path).Scalars("loss/train")] == [1]
    assert capsys.readouterr().out == ""
