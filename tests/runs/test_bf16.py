"""bf16 on a machine without a GPU: a network with batch normalization and kernels of one pixel, under every kind of preset.

On images of 32 pixels: on those of 8, ResNet-18 convolves maps of one pixel with a stride of two, which torch 2.15 computes
wrongly on processors with instructions for bf16.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image
from processes import REPOSITORY, Started, accelerate, read, read_lines

RUN = (
    *("--recipe", "digits", "--trackers", "none", "model.name=resnet18", "data.image_size=32"),
    *("train.global_batch_size=32", "train.steps=6", "log.every_steps=1"),
)
CASES = [
    pytest.param("fsdp2", "true", marks=pytest.mark.long),
    pytest.param("deepspeed_zero3", "true", marks=pytest.mark.long),
    pytest.param("multi_gpu", "true", marks=pytest.mark.long),
    pytest.param("fsdp2", "false", marks=pytest.mark.long),
]

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("cpu", tmp_path_factory.mktemp("bf16") / "single", "train.channels_last=true", processes=None)


def trained(preset: str, run_dir: Path, *arguments: str, processes: int | None = 2) -> Path:
    target = ("-m", "app.train", "--run-dir", str(run_dir), *RUN, *arguments)
    output = Started(accelerate(preset, "--mixed_precision", "bf16", target=target, processes=processes)).wait().check().output
    assert "strides" not in output, "DDP warns of gradients in another order than the weights"
    return run_dir


@pytest.mark.parametrize(("preset", "order"), CASES)
def test_a_resnet_learns_in_bf16(single: Path, preset: str, order: str, tmp_path: Path) -> None:
    lines = read_lines(trained(preset, tmp_path, f"train.channels_last={order}") / "metrics.jsonl")
    expected = read_lines(single / "metrics.jsonl")
    # Batch norms see half the batch on each of two processes, and bf16 keeps 8 bits.
    assert lines[0]["loss"] == pytest.approx(expected[0]["loss"], rel=0.1)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert read(tmp_path / "result.json")["test_loss"] > 0


def test_the_command_that_the_readme_has_for_gpus_trains_here(tmp_path: Path) -> None:
    lines = [line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("samerun launch")]
    (line,) = [line for line in lines if "--mixed-precision bf16" in line]
    for split, count in (("train", 8), ("val", 4)):
        for number in range(count):
            folder = tmp_path / "IMAGENET" / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 36), (50 * number % 256, 0, 99)).save(folder / f"{number}.JPEG")
    words = [word.replace("=DATA", f"={tmp_path / 'IMAGENET'}") for word in shlex.split(line, comments=True)[1:]]
    small = ("data.image_size=32", "data.resize_size=32", "train.global_batch_size=4", "train.steps=2", "log.every_steps=1")
    run_dir = ("--run-dir", str(tmp_path / "run"), "--trackers", "none")
    command = [sys.executable, "-m", "launch.cli", *words, "--processes", "2", *run_dir, *small, "optim.warmup_epochs=0.5"]
    output = Started(command).wait().check().output
    assert "mixed_precision bf16, float32 products in IEEE float32" in output
    assert read(tmp_path / "run" / "run.json")["mixed_precision"] == "bf16"
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert read(tmp_path / "run" / "result.json")["validation_samples"] == 4
