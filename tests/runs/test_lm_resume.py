"""A language model's run goes on under any preset on any number of processes, in one chain, and is killed at random moments."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from languages import write_answers
from moments import await_moment, await_step, last_step
from processes import read, read_lines, start, train

from app.checks.verify import verify
from app.errors import STOPPED

pytestmark = [pytest.mark.multiproc, pytest.mark.long]

# Rows of packed answers, of which another number counts in each; dropout that belongs to the sample. Phi has both a plan for
# tensor parallelism and dropout.
RECIPE = """
task: causal_lm
data: {document_masks: true}
model: {architecture: phi, hidden_size: 48, layers: 2, heads: 4, intermediate_size: 128, dropout: 0.1}
train: {global_batch_size: 12, evaluate_every_epochs: 0}
optim: {name: adamw, lr: 0.001, weight_decay: 0.1, clip_norm: 0.5, warmup_steps: 5}
log: {every_steps: 1, samples: true}
"""
STEPS, EACH = 320, 8
"""Of the whole run, and at least so many on each topology."""
CHAIN = [("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero1", 2), ("multi_gpu", 3), ("deepspeed_zero2", 2),
         ("context_parallel", 2), ("fsdp2", 2), ("hsdp", 4), ("context_parallel", 4), ("deepspeed_zero3", 4),
         ("tensor_parallel", 2), ("fsdp2", 3), ("tensor_parallel", 4), ("deepspeed_zero3", 2), ("hsdp", 4),
         ("multi_gpu", 4), ("tensor_parallel", 2), ("cpu", 1)]  # fmt: skip
SIZES = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "tensor_parallel": {"PARALLELISM_CONFIG_TP_SIZE": "2"},
         "context_parallel": {"PARALLELISM_CONFIG_CP_SIZE": "2"}}  # fmt: skip
"""HSDP as on two nodes of half the processes; tensor and context parallelism over 2, and FSDP2 over the rest."""
KILLS = 20


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "answers.yaml").write_text(RECIPE)
    write_answers(folder / "answers", sequence_length=256)
    return "--recipe", str(folder / "answers.yaml"), f"data.path={folder / 'answers'}"


def compared(run_dir: Path, reference: Path) -> float:
    """The largest relative difference of a step's loss; every step is there once, with the same samples and rates."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        steps = [line["step"] for line in read_lines(run_dir / name)]
        assert steps == [*range(1, len(steps) + 1)] == [line["step"] for line in read_lines(reference / name)]
    assert read_lines(run_dir / "samples.jsonl") == read_lines(reference / "samples.jsonl")
    lines, expected = read_lines(run_dir / "metrics.jsonl"), read_lines(reference / "metrics.jsonl")
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in expected]
    return max(abs(line["loss"] / other["loss"] - 1) for line, other in zip(lines, expected, strict=True))


def assert_ledger_is_good(run_dir: Path, steps: int) -> None:
    verdict, _ = verify(run_dir)
    assert (verdict.is_good, verdict.left_out, verdict.first_step, verdict.last_step) == (True, None, 1, steps), verdict


def test_one_chain_over_all_topologies_is_one_run(recipe: tuple[str, ...], tmp_path: Path) -> None:
    run_dir, words = tmp_path / "chain", (*recipe, f"train.steps={STEPS}")
    train("cpu", tmp_path / "alone", *words).check()
    for preset, processes in CHAIN[:-1]:
        command = ("app.train", "--run-dir", str(run_dir), "--trackers", "none", *words, "--resume", "auto")
        running = start(preset, processes, *command, env=SIZES.get(preset))
        await_step(running, run_dir, last_step(run_dir) + EACH)
        (run_dir / "STOP").touch()
        assert running.wait().returncode == STOPPED
    train("cpu", run_dir, *words, "--resume", "auto").check()
    difference = compared(run_dir, tmp_path / "alone")
    print(f"{len(CHAIN)} starts: largest relative difference {difference:.1e}")
    assert difference <= 1e-5
    assert_ledger_is_good(run_dir, STEPS)


def test_twenty_kills_at_random_moments_leave_one_run(recipe: tuple[str, ...], tmp_path: Path, chance: random.Random) -> None:
    run_dir, topologies = tmp_path / "killed", sorted(set(CHAIN))
    words = ("train.steps=1000000", "checkpoint.every_steps=2", "optim.schedule=constant", "optim.lr=1e-4", "--resume", "auto")
    for number in range(1, KILLS + 1):
        preset, processes = chance.choice(topologies)
        command = ("app.train", "--run-dir", str(run_dir), "--trackers", "none", *recipe, *words)
        running = start(preset, processes, *command, env=SIZES.get(preset))
        moment = await_moment(chance, running, run_dir, start_s=12.0, steps=40)
        running.kill()
        print(f"{number}: {preset} x {processes} at a {moment}, after step {last_step(run_dir)}", flush=True)
    (run_dir / "STOP").touch()
    train("cpu", run_dir, *recipe, *words)
    steps = read(run_dir / "outcome.json")["step"]
    assert_ledger_is_good(run_dir, steps)
    train("cpu", tmp_path / "alone", *recipe, *words[2:4], f"train.steps={steps}").check()
    difference = compared(run_dir, tmp_path / "alone")
    print(json.dumps({"steps": steps, "kills": KILLS, "largest relative difference": difference}))
    assert steps >= 100
    assert difference <= 1e-4
