"""Each preset on a real GPU: one process that learns what the CPU learns, learns it again, and goes on from what it saved.

Starting a process takes far longer than the steps: what does not need another run's end is started with it.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import ALONE, REPOSITORY, SCRIPTS, Finished, Started, accelerate, losses, read

from app.checkpoints import step_folders
from app.errors import TopologyError

PRESETS = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
DIGITS = ("--recipe", "digits", "train.epochs=5")
LLAMA = (
    *("--recipe", "lm_tiny", "model.hidden_size=64", "model.layers=2", "model.intermediate_size=128"),
    *("data.sequence_length=64", "train.global_batch_size=8", "train.steps=60", "train.evaluate_every_steps=60"),
    "optim.warmup_steps=10",
)
# Presets that keep copies of a model, for which one node is too few, and that divide matrices or rows of a language model.
DIVIDED = ("hsdp", "tensor_parallel", "context_parallel")
ALWAYS = ("--trackers", "none", "log.every_steps=1", "checkpoint.every_steps=40")
RUN = (*DIGITS, *ALWAYS)
# Of one forward pass, in IEEE's float32 on both: docs/same-run.md has no more for twenty steps.
FIRST_LOSS_TOLERANCE = 1e-5
# Of the steps in which rounding has not grown yet: kernels add in another order than the CPU's, and than in another run.
STEPS, TOLERANCE = 20, 1e-3

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]


def processes_of(preset: str) -> int:
    """One, or two under presets that divide matrices or rows, if there are two GPUs."""
    return max(1, min(2, torch.cuda.device_count())) if preset.endswith("_parallel") else 1


def start(preset: str, run_dir: Path, *arguments: str, of: tuple[str, ...] = DIGITS) -> Started:
    processes = () if preset in ALONE else ("--processes", str(processes_of(preset)))
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", preset, *processes, "--run-dir", str(run_dir)]
    return Started([*command, *of, *ALWAYS, *arguments])


def launch(preset: str, run_dir: Path, *arguments: str, of: tuple[str, ...] = DIGITS) -> Finished:
    return start(preset, run_dir, *arguments, of=of).wait()


def has_learnt(run_dir: Path) -> bool:
    result = read(run_dir / "result.json")
    if "test_accuracy" in result:
        return bool(result["test_accuracy"] > 0.9)
    return bool(result["validation_loss"] < 0.8 * losses(run_dir)[0])


def furthest(found: list[float], expected: list[float]) -> float:
    """The largest difference, as a share of what was expected."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Callable[[], list[float]]]:
    """The losses of a run on the CPU, which is started when it is first asked for, and waited for when they are."""

    @functools.cache
    def begun(words: tuple[str, ...]) -> Callable[[], list[float]]:
        run_dir = tmp_path_factory.mktemp("cpu")
        started = start("cpu", run_dir, of=words)

        @functools.cache
        def found() -> list[float]:
            started.wait().check()
            return losses(run_dir)

        return found

    return begun


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "cpu"])
def test_a_preset_trains_on_the_gpu_and_goes_on(
    preset: str,
    tmp_path: Path,
    on_cpu: Callable[[tuple[str, ...]], Callable[[], list[float]]],
    figure: Callable[[str], None],
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    words = LLAMA if preset in DIVIDED else DIGITS
    expected_of_cpu = on_cpu(words)
    for each in [start(preset, run_dir, of=words) for run_dir in (once, twice)]:
        each.wait().check()
    processes = read(once / "run.json")["world_size"]
    assert processes == processes_of(preset)
    if preset in DIVIDED:
        figure(f"a tiny Llama, {'one process: nothing is divided' if processes == 1 else f'{processes} processes'}")
    assert "cuda" in str(read(once / "run.json"))
    assert has_learnt(once)
    first, again, expected = losses(once), losses(twice), expected_of_cpu()
    for whom, found, other in (("the CPU", first, expected), ("itself", again, first)):
        early, all_of_it = furthest(found[:STEPS], other[:STEPS]), furthest(found, other)
        figure(f"furthest from {whom} in {STEPS} steps {early:.1e}, in all {len(found)} {all_of_it:.1e}")
    assert first[0] == pytest.approx(expected[0], rel=FIRST_LOSS_TOLERANCE)
    assert first[:STEPS] == pytest.approx(expected[:STEPS], rel=TOLERANCE)
    assert again[:STEPS] == pytest.approx(first[:STEPS], rel=TOLERANCE)
    (once / "result.json").unlink()
    newest, before = step_folders.committed(once)[:2]
    shutil.rmtree(newest)  # so that it has something to do
    launch(preset, once, "--resume", "auto", of=words).check()
    done = int(before.name.partition("-")[2])
    resumed = losses(once)
    figure(f"furthest from the undisturbed run after going on {furthest(resumed[done:], first[done:]):.1e}")
    assert resumed[:done] == first[:done]
    assert resumed[done] == pytest.approx(first[done], rel=FIRST_LOSS_TOLERANCE)
    assert has_learnt(once)


@pytest.mark.parametrize("switch", ["--mixed_precision=bf16", "--dynamo_backend=inductor"])
def test_precision_and_compiling_on_the_gpu(switch: str, tmp_path: Path) -> None:
    preset = str(REPOSITORY / "accelerate_configs" / "single_gpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", preset, switch, "-m", "app.train"]
    finished = Started([*command, "--run-dir", str(tmp_path), *RUN]).wait().check()
    assert "runs uncompiled" not in finished.output
    assert read(tmp_path / "result.json")["test_accuracy"] > 0.9


@pytest.mark.parametrize("preset", ["single_gpu", "multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_a_resnet_learns_in_bf16_in_the_order_of_tensor_cores(preset: str, tmp_path: Path) -> None:
    resnet = ("model.name=resnet18", "data.image_size=32", "optim.warmup_epochs=1")
    output = launch(preset, tmp_path, "--mixed-precision", "bf16", *resnet).check().output
    assert "strides" not in output, "DDP warns of gradients in another order than the weights"
    found = losses(tmp_path)
    assert found[-1] < 0.8 * found[0]


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
    assert "has no deterministic kernel for adaptive_avg_pool2d_backward_cuda" in finished.output


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
