"""Numbers that are not finite: in the initial weights, or in every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import Finished, read, read_lines, train
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.multiproc

TASK = """
import torch
from torch import nn

from app.task import Loss, Samples


class Line:
    def samples(self, split):
        if split != "train":
            return None
        x, y = torch.linspace(-1, 1, 64 * 4).view(64, 4), torch.linspace(0, 1, 64)
        return Samples.of({"x": x, "y": y})

    def model(self, metadata):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
        WEIGHTS
        return model

    def loss(self, model, batch):
        mean = (model(batch["x"]) - batch["y"]).square().mean()
        return Loss(LOSS, len(batch["x"]))


task = Line
"""
RECIPE = """
task: line.py
train: {global_batch_size: 16, steps: 5}
optim: {lr: 0.1, warmup_epochs: 0}
log: {every_steps: 1}
"""
INIT = """
    def init_module(self, model, name, module):
        torch.nn.init.normal_(module.weight)
        torch.nn.init.constant_(module.bias, float("inf"))

    def loss("""


def trained(
    folder: Path, *words: str, preset: str = "cpu", weights: str = "", loss: str = "mean", init: str = "", name: str = "run"
) -> Finished:
    text = TASK.replace("WEIGHTS", weights).replace("LOSS", loss)
    (folder / "line.py").write_text(text.replace("\n    def loss(", init) if init else text)
    (folder / "line.yaml").write_text(RECIPE)
    processes = 1 if preset == "cpu" else 2
    return train(preset, folder / name, "--recipe", str(folder / "line.yaml"), *words, processes=processes)


def assert_refused(finished: Finished, *said: str) -> None:
    assert finished.returncode != 0, finished.output
    for text in said:
        assert text in finished.output, finished.output
    assert "Traceback" not in finished.output, finished.output


NAN_WEIGHT = "model[2].weight.data[0, 7] = float('nan')"


@pytest.mark.parametrize(
    ("preset", "broken", "said"),
    [
        ("fsdp2", {"init": INIT}, "line.py contain inf, in 0.bias"),
        ("deepspeed_zero3", {"weights": NAN_WEIGHT}, "line.py contain nan, in 2.weight"),
    ],
)
def test_initial_weights_are_finite_or_named(tmp_path: Path, preset: str, broken: dict[str, str], said: str) -> None:
    assert_refused(
        trained(tmp_path, preset=preset, **broken), f"TrainingError: the initial weights from the task {tmp_path}/{said}"
    )
    assert not (tmp_path / "run").exists()


def test_weights_of_a_file_are_finite_or_named_and_masks_may_be_infinite(tmp_path: Path) -> None:
    mask = "model[0].register_buffer('mask', torch.full((2,), float('-inf')))"
    trained(tmp_path, weights=mask).check()
    weights = load_file(tmp_path / "run" / "model.safetensors")
    weights["0.bias"][3] = torch.nan
    save_file(weights, tmp_path / "nan.safetensors")
    bad = trained(tmp_path, f"train.init_from={tmp_path}/nan.safetensors", name="other", weights=mask)
    assert_refused(bad, f"TrainingError: the initial weights from {tmp_path}/nan.safetensors contain nan, in 0.bias")


def test_a_run_of_skipped_steps_only_has_failed(tmp_path: Path) -> None:
    """Its gradients are infinite, its losses are not; also in two starts, of which each has skipped half of the steps."""
    loss = "mean + (mean * 0).sqrt()"  # the derivative of a root at zero
    words = ("checkpoint.every_steps=2",)
    failed = trained(tmp_path, *words, preset="fsdp2", loss=loss)
    said = "TrainingError: all 5 steps of the run were skipped because loss or gradient was not finite"
    assert_refused(failed, said)
    assert [line["skipped_steps"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [[1], [2], [3], [4], [5]]
    assert not (tmp_path / "run" / "result.json").exists()
    assert_refused(trained(tmp_path, *words, "--resume", "auto", preset="fsdp2", loss=loss), said)


def test_a_resumed_run_with_steps_that_were_taken_has_not_failed(tmp_path: Path) -> None:
    trained(tmp_path, "checkpoint.every_steps=4").check()
    step = tmp_path / "run" / "checkpoints" / "step-00000004"
    words = ("--resume", str(step), "--changed-task")
    trained(tmp_path, *words, loss="mean + (mean * 0).sqrt()", name="rest").check()
    assert read(tmp_path / "rest" / "result.json")["steps"] == 5
