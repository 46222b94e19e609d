"""A step whose gradient is not finite is left out, on all ranks alike, counted, and does not spoil anything."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from processes import SCRIPTS, read_lines, run, train

from app.checkpoints.sharded_state import Shards, WeightAverage
from app.errors import TrainingError
from app.optim import parameter_groups
from app.optim.steps import Step, Steps
from app.recipe.schema import OptimRecipe

BAD_STEP, STEPS = 3, 6


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "presets"),
    [
        ("adamw", ("deepspeed_zero2", "deepspeed_zero3", "fsdp2")),
        ("sgd", ("deepspeed_zero3", "fsdp2")),
        pytest.param("adamw", ("deepspeed_zero1", "deepspeed_zero3_offload", "cpu"), marks=pytest.mark.slow),
        pytest.param("muon", ("fsdp2",), marks=pytest.mark.slow),
    ],
)
def test_one_bad_batch_of_one_rank_is_skipped_by_all_under_every_strategy(
    kind: str, presets: tuple[str, ...], tmp_path: Path
) -> None:
    losses = {}
    for preset in ("multi_gpu", *presets):
        folder = tmp_path / preset
        recipe = ("--recipe", "digits", f"train.steps={STEPS}", f"optim.name={kind}", "train.ema_decay=0.9",
                  "model.activation=gelu", "log.every_steps=1")  # fmt: skip
        processes = 1 if preset == "cpu" else 2
        bad = {"BAD_RANK": str(processes - 1), "BAD_PASS": str(BAD_STEP), "BAD_FACTOR": "nan"}
        command = (str(SCRIPTS / "bad_batch.py"), "--run-dir", str(folder), "--trackers", "none", *recipe)
        run(preset, processes, *command, env=bad).check()
        lines = read_lines(folder / "metrics.jsonl")
        assert [line["skipped_steps"] for line in lines] == [[], [], [BAD_STEP], [], [], []], preset
        assert lines[BAD_STEP - 1]["loss"] is None
        *_, evaluation = read_lines(folder / "evaluations.jsonl")  # of the average
        losses[preset] = [line["loss"] for line in lines if line["step"] != BAD_STEP] + [evaluation["test_loss"]]
    for preset, found in losses.items():
        assert found == pytest.approx(losses["multi_gpu"], rel=1e-5), preset


@pytest.mark.multiproc
def test_too_many_in_a_row_end_the_run_with_the_step_the_samples_and_the_checkpoint(tmp_path: Path) -> None:
    diverging = ("optim.name=sgd", "optim.lr=1e30", "optim.schedule=constant", "optim.warmup_steps=0")
    wanted = ("log.every_steps=1", "train.max_skipped_steps=2", "checkpoint.every_steps=1")
    finished = train("cpu", tmp_path / "run", "--recipe", "digits", "train.steps=9", *diverging, *wanted)
    assert finished.returncode != 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    skipped = [step for line in lines for step in line["skipped_steps"]]
    assert skipped == [skipped[0], skipped[0] + 1, skipped[0] + 2]
    assert f"TrainingError: the last 3 steps up to step {skipped[-1]} were skipped" in finished.output
    assert "the last batch has the samples " in finished.output
    assert "raise train.max_gradient_spike or look at the samples." in finished.output, "the data is finite"
    assert f"The latest checkpoint is {tmp_path}/run/checkpoints/step-{skipped[-2]:08d}" in finished.output


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "nesterov", "no momentum"])
def test_the_verdict_may_be_left_to_the_fused_kernels(kind: str) -> None:
    """As on GPUs, where looking at it would wait for the device: as if the steps left out had never been."""
    name, momentum = kind if kind in ("adamw", "muon") else "sgd", 0.0 if kind == "no momentum" else 0.9
    recipe = OptimRecipe(name=name, lr=0.1, weight_decay=0.1, momentum=momentum, nesterov=kind == "nesterov")
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    layer: torch.nn.Module = torch.nn.Linear(4, 3)
    if kind == "muon":  # which steps on the second of three matrices
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), layer)
    looking, leaving, spared = layer, copy.deepcopy(layer), copy.deepcopy(layer)
    takers = []
    for plain, looks in ((looking, True), (leaving, False), (spared, False)):
        model, optimizer = accelerator.prepare(plain, parameter_groups.build_optimizer(recipe, plain))
        steps = Steps(accelerator, model, optimizer, clip_norm=None, looks=looks)
        takers.append((model, optimizer, steps, WeightAverage(Shards(accelerator, model, optimizer), decay=0.9)))
    for factor in (float("nan"), 1.0, float("nan"), 2.0, float("inf"), float("-inf"), 3.0):  # the very first one too
        inputs = torch.randn(5, 4)
        taken: list[Step] = []
        for model, _, steps, average in takers[: 3 if math.isfinite(factor) else 2]:
            steps.backward(model(inputs).square().sum() * factor, 1.0)
            taken.append(steps.take(0.1))
            average.update(taken[-1].skipped)
        assert {bool(step.skipped) for step in taken} == {not math.isfinite(factor)}
        assert isinstance(taken[1].skipped, torch.Tensor)
        if math.isfinite(factor):
            assert_alike(takers[0], takers[1], rtol=1e-5, atol=1e-7)  # on a CPU fused kernels round otherwise
            assert_alike(takers[1], takers[2], rtol=0, atol=0)
    counts = [state["step"] for state in takers[1][1].state.values() if "step" in state]
    assert counts == [3] * {"adamw": 2, "muon": 5}.get(kind, 0)


def assert_alike(first: tuple[Any, ...], second: tuple[Any, ...], *, rtol: float, atol: float) -> None:
    """Weights, what the optimizer keeps, and averages."""
    tensors = []
    for model, optimizer, _, average in (first, second):
        states = [state[key] for state in optimizer.state.values() for key in sorted(state) if torch.is_tensor(state[key])]
        tensors.append([*model.parameters(), *states, *average.tensors])
    for ours, theirs in zip(*tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


# fp16 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_gradient_scaler_skips_what_it_skips_in_plain_torch(kind: str, looks: bool, accumulation: int) -> None:
    """From a scale of 65,536 on, at which half precision overflows: torch's own loop, whose optimizer it does not call then."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=4)  # which on GPUs comes with fp16
    ours = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    theirs = copy.deepcopy(ours)
    recipe = OptimRecipe(name=kind, lr=0.01)
    model, optimizer = accelerator.prepare(ours, parameter_groups.build_optimizer(recipe, ours))
    steps = Steps(accelerator, model, optimizer, clip_norm=None, looks=looks)
    plain = parameter_groups.build_optimizer(recipe, theirs, fused=False)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    skipped = []
    for step in range(14):
        for inputs in torch.randn(accumulation, 16, 8):
            with steps.micro_batch(), torch.autocast("cpu", torch.float16):
                steps.backward(model(inputs).square().mean() * 30, 1 / accumulation)
            with torch.autocast("cpu", torch.float16):
                scaler.scale(theirs(inputs).square().mean() * 30 / accumulation).backward()
        skipped.append(bool(steps.take(0.01).skipped))
        before, scale = theirs[0].weight.clone(), scaler.get_scale()
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
        assert skipped[-1] == torch.equal(theirs[0].weight, before) == (scaler.get_scale() < scale), step
        assert accelerator.scaler.get_scale() == scaler.get_scale()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)
    assert skipped[:2] == [True, True], "the early ones"
    assert (False, True) in itertools.pairwise(skipped), "and after the scale has grown"


# Parameters without a gradient -----------------------------------------------------------------------------------------------


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "processes"), [("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero3", 2), ("fsdp2", 2)])
def test_a_parameter_that_is_not_used_is_named_and_a_frozen_one_is_not(preset: str, processes: int) -> None:
    """In steps of 2 or 4 passes."""
    finished = run(preset, processes, str(SCRIPTS / "unused.py"))
    assert finished.returncode == TrainingError.exit_code, finished.output
    said = "2 trainable parameters have no gradient after the first step's backward passes: unused.weight, unused.bias. "
    assert f"TrainingError: {said}" in finished.output
    assert "frozen" not in finished.output
