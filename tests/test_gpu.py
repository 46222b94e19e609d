"""Each preset on a real GPU: one process that begins as on the CPU and learns the same, and goes on from what it saved."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import ALONE, REPOSITORY, SCRIPTS, Finished, Started, accelerate, read, read_lines

from app import known_answers
from app.checkpoints import step_folders
from app.errors import TopologyError

PRESETS = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
RUN = ("--recipe", "digits", "--trackers", "none", "log.every_steps=1", "train.epochs=5", "checkpoint.every_steps=40")
# Of one forward pass, in IEEE's float32 on both: docs/same-run.md has no more for twenty steps.
FIRST_LOSS_TOLERANCE = 1e-5

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]


def launch(preset: str, run_dir: Path, *arguments: str) -> Finished:
    processes = () if preset in ALONE else ("--processes", "1")
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", preset, *processes, "--run-dir", str(run_dir)]
    return Started([*command, *RUN, *arguments]).wait()


@pytest.fixture(scope="module")
def first_loss_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> float:
    run_dir = tmp_path_factory.mktemp("cpu")
    launch("cpu", run_dir).check()
    return float(read_lines(run_dir / "metrics.jsonl")[0]["loss"])


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "cpu"])
def test_a_preset_trains_on_the_gpu_and_goes_on(preset: str, tmp_path: Path, first_loss_on_cpu: float) -> None:
    launch(preset, tmp_path).check()
    assert "cuda" in str(read(tmp_path / "run.json"))
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(first_loss_on_cpu, rel=FIRST_LOSS_TOLERANCE)
    assert read(tmp_path / "result.json")["test_accuracy"] > 0.9
    (tmp_path / "result.json").unlink()
    shutil.rmtree(step_folders.committed(tmp_path)[0])  # so that it has something to do
    launch(preset, tmp_path, "--resume", "auto").check()
    assert read(tmp_path / "result.json")["test_accuracy"] > 0.9


@pytest.mark.parametrize("switch", ["--mixed_precision=bf16", "--dynamo_backend=inductor"])
def test_precision_and_compiling_on_the_gpu(switch: str, tmp_path: Path) -> None:
    preset = str(REPOSITORY / "accelerate_configs" / "single_gpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", preset, switch, "-m", "app.train"]
    finished = Started([*command, "--run-dir", str(tmp_path), *RUN]).wait().check()
    assert "runs uncompiled" not in finished.output
    assert read(tmp_path / "result.json")["test_accuracy"] > 0.9


def test_a_deterministic_run_gives_the_same_bits_twice(tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        launch("single_gpu", tmp_path / name, "train.deterministic=true").check()
        assert read(tmp_path / name / "run.json")["deterministic"] is True
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_model_without_deterministic_kernels_is_refused_in_a_sentence(tmp_path: Path) -> None:
    alexnet = ("model.name=alexnet", "data.image_size=64", "train.global_batch_size=16", "train.deterministic=true")
    finished = launch("single_gpu", tmp_path, *alexnet)
    assert finished.returncode == 3
    assert "has no kernel for adaptive_avg_pool2d_backward_cuda that gives the same bits each time" in finished.output


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gpu_gives_known_answers_in_a_fraction_of_a_second(precision: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    first = list(known_answers.compute(device, precision, known_answers.GENERAL))
    start_s = time.perf_counter()
    second = list(known_answers.compute(device, precision, known_answers.GENERAL))
    elapsed_s = time.perf_counter() - start_s
    assert [each.answer for each in (*first, *second) if each.answer.wrong or each.answer.unsteady] == []
    assert [each.answer.digest for each in first] == [each.answer.digest for each in second]
    assert elapsed_s < 1.0


@pytest.mark.parametrize("preset", ["multi_gpu", "deepspeed_zero2", "fsdp2"])
def test_two_processes_on_one_gpu_are_told_so_in_seconds(preset: str, tmp_path: Path) -> None:
    target = ("-m", "app.train", "--run-dir", str(tmp_path / "run"), *RUN)
    start_s = time.perf_counter()
    finished = Started(accelerate(preset, target=target, processes=2), env={"CUDA_VISIBLE_DEVICES": "0"}).wait()
    elapsed_s = time.perf_counter() - start_s
    assert finished.returncode != 0
    assert "TopologyError: ranks 0, 1 on" in finished.output
    assert "would share cuda:0 (of 1 visible there)" in finished.output
    assert f"exitcode  : {TopologyError.exit_code} " in finished.output
    assert "NCCL error" not in finished.output
    assert elapsed_s < 60.0  # imports take most of it; NCCL's own time-out is 600 s
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["deepspeed_zero2", "fsdp2"])
def test_what_ranks_tell_each_other_goes_past_the_gpu(preset: str, tmp_path: Path) -> None:
    """In the group of one process that these presets make. Its device is busy meanwhile, and nobody waits for it."""
    command = accelerate(preset, target=(str(SCRIPTS / "busy.py"),), processes=1)
    assert "told while the GPU was busy" in Started(command).wait().check().output
