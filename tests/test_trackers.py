"""Trackers have what the files of the run folder have, under the same names, as one run over all its starts."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import read, read_lines, train
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.api_pb2 import ColParams, ListSessionGroupsRequest, MetricName, Status
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from app import checkpoint_files
from app.trackers.tracked import tracked
from app.trackers.trackers import Trackers

pytestmark = pytest.mark.multiproc

# Epochs have 22 steps: evaluations after 22 and 24, pictures in steps 1 and 23.
RECIPE = (
    "--recipe",
    "digits",
    "train.global_batch_size=64",
    "log.every_steps=3",
    "checkpoint.every_steps=20",
    "augment.mixup=0.2",
)


def go_on_after_a_kill(run_dir: Path, trackers: str, *, env: Mapping[str, str] | None = None, processes: int = 1) -> None:
    """Train 24 steps, lose the last checkpoint as a kill would have, and train 30 steps from that of step 20."""
    shutil.rmtree(checkpoint_files.path_of(run_dir, 24))
    (run_dir / "result.json").unlink()
    options = ("--trackers", trackers, "--resume", "auto", *RECIPE, "train.steps=30")
    train("multi_gpu" if processes > 1 else "cpu", run_dir, *options, processes=processes, env=env).check()
    assert read(run_dir / "run.json")["resumed_step"] == 20


def shown(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    return accumulator.Reload()


def numbers(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The curves of a file: step and value of each name."""
    names = {name for line in lines for name, value in line.items() if isinstance(value, (int, float))} - {"step", "time"}
    return {name: [(line["step"], line[name]) for line in lines if line[name] is not None] for name in names}


def hyperparameters(run_dir: Path) -> Any:
    """What TensorBoard's own server answers for the page HPARAMS of one run."""
    files = EventMultiplexer().AddRunsFromDirectory(str(run_dir)).Reload()
    context = TBContext(data_provider=MultiplexerDataProvider(files, str(run_dir)))
    scores = [ColParams(metric=MetricName(tag=tag)) for tag in ("test_accuracy", "test_loss")]
    request = ListSessionGroupsRequest(allowed_statuses=[Status.STATUS_UNKNOWN], col_params=scores, slice_size=10)
    (group,) = Handler(RequestContext(), Context(context), "", request).run().session_groups
    return group


def test_tensorboard_has_the_files_of_the_run_folder_and_each_step_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train("cpu", run_dir, "--trackers", "tensorboard", *RECIPE, "train.steps=24").check()
    before = shown(run_dir).Images("augmented_batch")
    go_on_after_a_kill(run_dir, "tensorboard", processes=2)

    board = shown(run_dir)
    metrics, evaluations = (numbers(read_lines(run_dir / f"{name}.jsonl")) for name in ("metrics", "evaluations"))
    assert [step for step, _ in metrics["loss"]] == [*range(3, 19, 3), *range(21, 31, 3)]
    assert [step for step, _ in evaluations["test_accuracy"]] == [22, 30]
    curves = evaluations | metrics  # where a line was evaluated is said in evaluations.jsonl alone
    found = {name: [(event.step, event.value) for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert {name for name, curve in found.items() if curve} == set(curves) >= {"loss", "learning_rate", "test_accuracy"}
    for name, curve in curves.items():
        assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in curve], name

    pictures = board.Images("augmented_batch")
    assert [picture.step for picture in pictures] == [picture.step for picture in before] == [1, 23]
    for picture, other in zip(pictures, before, strict=True):
        assert picture.encoded_image_string == other.encoded_image_string, "one process and two give the same pictures"

    page = hyperparameters(run_dir)
    assert page.hparams["optim.name"].string_value == "adamw"
    assert page.hparams["train.steps"].number_value == 30, "those of the last start"
    result = read(run_dir / "result.json")
    scores = {value.name.tag: (value.training_step, value.value) for value in page.metric_values}
    assert scores == {name: (30, pytest.approx(result[name], rel=1e-6)) for name in ("test_accuracy", "test_loss")}


def test_a_tracker_that_cannot_start_is_switched_off(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    finished = train("cpu", tmp_path, "--trackers", "tensorboard", *RECIPE, "train.steps=2").check()
    assert finished.output.count("note: the tracker tensorboard is switched off, because it failed (FileExistsError") == 1
    assert read(tmp_path / "result.json")["steps"] == 2


# TensorBoard writes in a thread, which dies of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tracker_that_fails_later_is_switched_off_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
    run = tracked(tmp_path, project="digits", first_step=0, logged={})
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
    assert said.count("the tracker tensorboard is switched off, because it failed (OSError: [Errno 27] File too large") == 1
    trackers.log("metrics.jsonl", {"loss": 1.0}, step=4)
    trackers.finish()
    assert [event.step for event in shown(tmp_path).Scalars("loss")] == [1]
    assert capsys.readouterr().out == ""
