"""Between two logs nothing waits for the device: not for a step's verdict, not for a digest, not where a batch was bad.

scripts/waits.py ends a run at whatever does, and it makes a batch bad as well: the verdict on it is the device's own.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ALONE, SCRIPTS, Started, accelerate, read_lines, run

STEPS, EVERY, BAD_STEP = 40, 10, 3
RECIPE = (
    "--trackers", "none", "--recipe", "digits", f"train.steps={STEPS}", f"log.every_steps={EVERY}", "train.ema_decay=0.9",
    "train.evaluate_every_epochs=0",
)  # fmt: skip
BAD = {"BAD_PASS": str(BAD_STEP), "BAD_FACTOR": "nan"}
SGD = ("optim.name=sgd", "optim.lr=0.1")
KINDS = {"adamw": (), "sgd": SGD}


def losses(folder: Path) -> list[float]:
    """The losses of a run that has skipped its bad step, and no other, and has learnt nevertheless."""
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [[BAD_STEP], [], [], []]
    found = [line["loss"] for line in lines]
    assert all(map(math.isfinite, found))
    assert found[-1] < 0.5 * found[0]
    *_, evaluation = read_lines(folder / "evaluations.jsonl")  # of the average
    return [*found, evaluation["test_loss"]]


def command(folder: Path, *arguments: str, script: str = "waits.py") -> tuple[str, ...]:
    return (str(SCRIPTS / script), "--run-dir", str(folder), *RECIPE, *arguments)


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "kind"), [("cpu", "adamw"), ("multi_gpu", "sgd"), ("fsdp2", "sgd")])
def test_nothing_waits_where_steps_are_taken_as_on_a_gpu(preset: str, kind: str, tmp_path: Path) -> None:
    """And the run is that of the CPU, which looks at each norm."""
    processes = 1 if preset == "cpu" else 2
    environment = {**BAD, "BAD_RANK": str(processes - 1), "LAST_STEP": str(STEPS), "CUDA_VISIBLE_DEVICES": ""}
    left = run(preset, processes, *command(tmp_path / "left", *KINDS[kind]), env=environment).check()
    assert left.output.count("nothing waits from here on") == processes * (STEPS // EVERY - 1)
    looking = command(tmp_path / "looking", *KINDS[kind], script="bad_batch.py")
    run("cpu", 1, *looking, env={**environment, "BAD_RANK": "0"}).check()
    assert losses(tmp_path / "left") == pytest.approx(losses(tmp_path / "looking"), rel=1e-4)


# On a GPU --------------------------------------------------------------------------------------------------------------------


def on_gpu(preset: str, folder: Path, *arguments: str, precision: str = "no") -> list[float]:
    # DeepSpeed waits in every step, to see whether its gradient is finite.
    waits = preset.startswith("deepspeed")
    target = command(folder, *arguments, script="bad_batch.py" if waits else "waits.py")
    launched = accelerate(preset, "--mixed_precision", precision, target=target, processes=None if preset in ALONE else 1)
    finished = Started(launched, env={**BAD, "BAD_RANK": "0", "LAST_STEP": str(STEPS)}).wait().check()
    assert waits or "that was all" in finished.output
    return losses(folder)


@pytest.fixture
def alone(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[float]]:
    """Trains on the GPU without sharding, once for all workers of pytest-xdist."""
    workers = "PYTEST_XDIST_WORKER" in os.environ
    folder = (tmp_path_factory.getbasetemp().parent if workers else tmp_path_factory.getbasetemp()) / f"alone-{kind}"

    def trained() -> list[float]:
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return losses(folder) if (folder / "result.json").exists() else on_gpu("single_gpu", folder, *KINDS[kind])

    return trained


SHARDED = ("multi_gpu", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload")
HALF = (("single_gpu", "bf16"), ("fsdp2", "bf16"), ("single_gpu", "fp16"))


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("preset", "precision"), [*((preset, "no") for preset in SHARDED), *HALF])
def test_a_bad_batch_is_skipped_on_the_gpu_and_nothing_waits(
    preset: str, precision: str, kind: str, tmp_path: Path, alone: Callable[[], list[float]]
) -> None:
    found = on_gpu(preset, tmp_path, *KINDS[kind], precision=precision)
    assert precision != "no" or found[0] == pytest.approx(alone()[0], rel=1e-3)
