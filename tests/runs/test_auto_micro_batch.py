"""`train.max_micro_batch=auto`: a run that is out of memory starts again with half of its micro-batch, and stays the same run.

The memory is an address space that the shell limits, or that of a control group. One sample of the task needs much of it, in
step 7 with a global batch of 8.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import memory_group
import pytest
from processes import Finished, Started, captured, clean_environment, free_port, read, read_lines, run, train

from app.errors import LackOfMemoryError, TopologyError
from app.recipe.recipe_file import load
from launch.start.resolved import checked

pytestmark = pytest.mark.multiproc

TASK = """
import os, signal, torch
from samerun import Loss, Samples
class Hungry:
    def samples(self, split):
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        inputs[43, 0] = 10.0
        return None if split == "test" else Samples.of({{"inputs": inputs, "targets": inputs.sum(1)}})
    def model(self, metadata):
        return torch.nn.Linear(4, 1)
    def loss(self, model, batch):
        inputs = batch["inputs"]
        if {when} and inputs[:, 0].max() > 9:
            {what}
        return Loss(((model(inputs).squeeze(1) - batch["targets"]) ** 2).mean())
task = Hungry
"""
LIMIT_GIB = 12
"""Of each process, which has 4 before its first step. 8 samples of 1.5 GiB do not fit, and 4 do. Nothing is written there."""
RESERVED = "torch.empty(len(inputs), 1536 << 20, dtype=torch.uint8)"
WRITTEN = "torch.ones(len(inputs), 512 << 20, dtype=torch.uint8)"
STEPS = 12


def recipe(folder: Path, what: str = RESERVED, *, when: str = "model.training") -> tuple[str, ...]:
    (folder / "hungry.py").write_text(TASK.format(what=what, when=when))
    settings = {
        "task": "hungry.py",
        "train": {"global_batch_size": 8, "steps": STEPS, "max_micro_batch": "auto", "evaluate_every_steps": 3},
        "log": {"every_steps": 1, "samples": True},
        "checkpoint": {"every_steps": 4, "keep_last": 9},
    }
    (folder / "hungry.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return "--trackers", "none", "--recipe", str(folder / "hungry.yaml")


def launched(run_dir: Path, *words: str, limit_gib: float = LIMIT_GIB, **environment: str) -> Finished:
    """Run `samerun launch` where each process has so much address space."""
    shell = ["/bin/bash", "-c", f'ulimit -v {int(limit_gib * 2**20)} && exec "$@"', "bash"]
    command = [*shell, sys.executable, "-m", "launch.cli", "launch", "--run-dir", str(run_dir), *words]
    return Started(command, env=clean_environment() | environment).wait()


def assert_halved_once(finished: Finished, run_dir: Path, batch: int) -> None:
    """The run continued once, with micro-batches of 4 instead of 8, and computed what one process does that needs no memory."""
    (step,) = re.findall(r"out of memory with micro-batch 8: starting again with 4 from step (\d+)\n", finished.check().output)
    assert "restart 1 of" not in finished.output
    starts = [line["from_step"] for line in read_lines(run_dir / "ledger.jsonl") if line["event"] == "start"]
    assert starts == [0, int(step)]
    assert read(run_dir / "run.json")["micro_batch"] == 4
    assert load(str(run_dir / "recipe.yaml")).recipe.train.max_micro_batch == "auto"
    (alone := run_dir.with_name("alone")).mkdir()
    words = (*recipe(alone, "pass"), f"train.global_batch_size={batch}", "train.max_micro_batch=null")
    train("cpu", alone / "run", *words).check()
    rows, expected = (read_lines(folder / "metrics.jsonl") for folder in (run_dir, alone / "run"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in expected]
    assert len(rows) == STEPS
    assert (run_dir / "samples.jsonl").read_text() == (alone / "run" / "samples.jsonl").read_text()


CASES = [
    pytest.param("cpu", 1, LIMIT_GIB, marks=pytest.mark.slow),
    pytest.param("multi_gpu", 2, LIMIT_GIB, marks=pytest.mark.slow),
    pytest.param("multi_gpu", 4, LIMIT_GIB, marks=pytest.mark.long),
    pytest.param("fsdp2", 2, LIMIT_GIB, marks=pytest.mark.long),
    *(pytest.param(f"deepspeed_zero{stage}", 2, 16, marks=pytest.mark.long) for stage in (2, 3)),
]


@pytest.mark.parametrize(("preset", "processes", "limit_gib"), CASES)
def test_a_run_without_room_continues_with_half(preset: str, processes: int, limit_gib: float, tmp_path: Path) -> None:
    words = (*recipe(tmp_path), f"train.global_batch_size={8 * processes}")
    counts, run_dir = ("--preset", preset, "--processes", str(processes)), tmp_path / "run"
    finished = launched(run_dir, *counts, *words, limit_gib=limit_gib)
    assert_halved_once(finished, run_dir, 8 * processes)
    # Another start begins with what was found, and one on other processes does not.
    again = launched(run_dir, "--dry-run", *counts, *words)
    assert f"= micro-batch 4 (auto) x accumulation 2 x {processes} process" in again.output
    other = launched(run_dir, "--dry-run", "--preset", "hsdp", "--processes", str(2 * processes), *words)
    assert f"= micro-batch 4 (auto) x accumulation 1 x {2 * processes} process" in other.output
    run("cpu", None, "app.evaluate", str(run_dir), "--split", "validation").check()


@pytest.mark.long
def test_an_evaluation_without_room(tmp_path: Path) -> None:
    words = recipe(tmp_path, when="not model.training")
    finished = launched(tmp_path / "run", "--preset", "cpu", *words)
    assert_halved_once(finished, tmp_path / "run", 8)


@pytest.mark.long
def test_two_nodes_take_the_same(tmp_path: Path) -> None:
    """Both are this machine, by what stands in for ssh."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "cd; $*"\n')
    ssh.chmod(0o755)
    words = (*recipe(tmp_path), "train.global_batch_size=16")
    nodes = {"SAMERUN_HOSTS": f"{socket.gethostname()},other", "PATH": f"{ssh.parent}:{clean_environment()['PATH']}"}
    finished = launched(tmp_path / "run", "--port", str(free_port()), *words, **nodes)
    assert_halved_once(finished, tmp_path / "run", 16)
    assert finished.output.count("env SAMERUN_MICRO_BATCH=4 ") == 2


@pytest.mark.long
@pytest.mark.skipif(memory_group.why_not() is not None, reason=str(memory_group.why_not()))
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_killed_for_memory(processes: int, tmp_path: Path) -> None:
    """8 samples take 4 GiB, and 4 take 2; each process has 0.5 GiB before, and so has `accelerate launch`."""
    words = (*recipe(tmp_path, WRITTEN), f"train.global_batch_size={8 * processes}")
    counts = ("--preset", "multi_gpu", "--processes", str(processes), "--run-dir", str(tmp_path / "run"))
    with memory_group.limited(4 * 2**30) as group:
        command = group.inside([sys.executable, "-m", "launch.cli", "launch", *counts, *words])
        finished = Started(command, env=clean_environment()).wait()
    assert "was ended by SIGKILL" in finished.output or processes == 1
    assert_halved_once(finished, tmp_path / "run", 8 * processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (RESERVED.replace("1536", "16384"), LackOfMemoryError.exit_code,
         r"LackOfMemoryError: train\.max_micro_batch is auto \(.*hungry\.yaml:1\), but the run is out of memory with 1 sample "
         r"per forward pass\. Change train\.checkpoint_activations=blocks, or several machines with --preset fsdp2\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
    ],
    ids=["one sample is too large", "killed by another"],
)  # fmt: skip
def test_what_less_would_not_help(what: str, code: int, said: str, tmp_path: Path) -> None:
    words = recipe(tmp_path, what)
    finished = launched(tmp_path / "run", "--preset", "cpu", *words, "train.global_batch_size=1", "train.steps=80")
    assert finished.returncode == code, finished.output
    assert re.search(said, finished.output), finished.output
    assert "starting again" not in finished.output


NORMALIZED = ("--recipe", "digits", "model.name=resnet18")


@pytest.mark.parametrize(
    ("own", "environment", "sentence"),
    [
        (None, {}, r"train\.max_micro_batch is auto \(command line\), for which .*, such as train\.max_micro_batch=64"),
        (None, {"SAMERUN_MICRO_BATCH": "64"}, r"batch normalization \(bn1 and 19 more\), whose statistics depend on the micro"),
        ("inputs = inputs + torch.rand(1)", {"SAMERUN_MICRO_BATCH": "8"}, r"do not belong to samples .* \(auto\)"),
    ],
    ids=["accelerate launch", "batch normalization", "random numbers of a pass"],
)
def test_what_is_refused(own: str | None, environment: dict[str, str], sentence: str, tmp_path: Path) -> None:
    words = NORMALIZED if own is None else recipe(tmp_path, own, when="True or model.training")
    finished = train("cpu", tmp_path / "run", *words, "train.max_micro_batch=auto", env=environment)
    assert finished.returncode not in (0, None)
    assert re.search(sentence, finished.output), finished.output


def test_a_task_of_srun_takes_what_its_job_has_chosen() -> None:
    task, words = captured("slurm/2node-1task-gres2-step-task1"), ["--recipe", "digits", "train.max_micro_batch=auto"]
    with pytest.raises(TopologyError, match=r"^train\.max_micro_batch is auto, but a task started by srun cannot restart"):
        checked(words, task)
    told = checked(words, {**task, "SAMERUN_ATTEMPT": "x-1", "SAMERUN_MICRO_BATCH": "4"})
    assert (told.plan.micro_batch, told.plan.accumulation) == (4, 4)
    assert "SAMERUN_MICRO_BATCH=4" in told.accelerate_argv()
