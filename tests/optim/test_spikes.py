"""A gradient out of all proportion is left out like one that is not finite, by all ranks, under every strategy."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from processes import SCRIPTS, read, read_lines, run

from app.checkpoints import step_folders
from app.optim import parameter_groups
from app.optim.steps import SpikeGuard, Steps
from app.recipe.schema import OptimRecipe

FACTOR = 100.0
SPIKE, SAVED, STEPS = 76, 70, 82  # the saved norms end between two renewals of the limit
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", f"train.max_gradient_spike={FACTOR}", "model.norm=identity",
    "optim.clip_norm=null", "train.ema_decay=0.9", "log.every_steps=1", f"checkpoint.every_steps={SAVED}",
    "train.evaluate_every_epochs=0", "log.each_step=true",
)  # fmt: skip


def plain_verdicts(norms: list[float]) -> list[bool]:
    """Which norms are spikes, in other words than the guard's."""
    accepted: list[float] = []
    spikes, limit, first = [], math.inf, None
    for step, norm in enumerate(norms, start=1):
        spikes.append(not (math.isfinite(norm) and norm < limit))
        if not spikes[-1]:
            accepted.append(norm)
        if step % 16 == 0 and len(accepted) >= 64:
            last = sorted(accepted[-128:])
            median = last[(len(last) - 1) // 2]
            first = median if first is None else first
            limit = FACTOR * max(median, first)
    return spikes


def verdicts(guard: SpikeGuard, norms: list[float], *, on_device: bool) -> list[bool]:
    """Those of the guard, of floats or, as where nobody looks at them, of tensors."""
    found: list[Any] = []
    for norm in norms:
        value: Any = torch.tensor(norm) if on_device else norm
        left_out = (~(value < guard.limit)).float() if on_device else not value < guard.limit
        guard.see(value, skipped=left_out)
        found.append(left_out)
    return [bool(left_out) for left_out in found]


@pytest.fixture
def norms() -> list[float]:
    chance = random.Random(0)
    many = [math.exp(chance.gauss(0.0, 1.0) - step / 100) for step in range(500)]
    for step, factor in ((40, 1e9), (90, 1e9), (91, math.inf), (92, math.nan), (200, 99.0), (201, 2e3), (300, 1e18)):
        many[step] = factor * many[step - 1]
    many[330:345] = [1e5] * 15
    return [torch.tensor(norm).item() for norm in many]  # in float32, as norms are


def test_spikes_are_told_by_the_median_of_accepted_norms(norms: list[float]) -> None:
    expected = plain_verdicts(norms)
    assert sum(expected) == 20
    assert not expected[40], "a spike before there is a median"
    for on_device in (False, True):
        assert verdicts(SpikeGuard(FACTOR), norms, on_device=on_device) == expected
    assert [step for step, is_spike in enumerate(verdicts(SpikeGuard(None), norms, on_device=False)) if is_spike] == [91, 92]


def test_norms_that_shrink_or_are_zero_may_grow_back_to_what_they_were() -> None:
    for on_device in (False, True):
        assert not any(verdicts(SpikeGuard(FACTOR), [0.0] * 100 + [1.0] * 60, on_device=on_device))
    shrinking = [1.0] * 70 + [1e-6] * 200
    found = verdicts(SpikeGuard(FACTOR), [*shrinking, 50.0, 1e3, 1e-6], on_device=False)
    assert found == [False] * 271 + [True, False]


@pytest.mark.parametrize("saved", [5, 64, 70, 91, 96, 333, 400])
def test_a_resumed_run_comes_to_the_same_verdicts(norms: list[float], saved: int) -> None:
    first = SpikeGuard(FACTOR)
    before = verdicts(first, norms[:saved], on_device=True)
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    assert len(state["norms"]) <= 128
    for on_device in (False, True):
        second = SpikeGuard(FACTOR)
        second.load(state, step=saved)
        assert before + verdicts(second, norms[saved:], on_device=on_device) == plain_verdicts(norms)


def test_steps_that_the_recipe_skips_do_not_feed_the_guard(norms: list[float]) -> None:
    for on_device in (False, True):
        guard, found = SpikeGuard(FACTOR), list[bool]()
        for at in range(0, 480, 48):  # the limit is updated within, at the end of and after the skipped steps
            found += verdicts(guard, norms[at : at + 28], on_device=on_device)
            for _ in range(20):
                guard.see(None, skipped=True)
        spoilt = [math.inf if step % 48 >= 28 else norm for step, norm in enumerate(norms[:480])]
        assert found == [is_spike for step, is_spike in enumerate(plain_verdicts(spoilt)) if step % 48 < 28]
        assert sum(found) > 3


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_nothing_of_a_spike_is_stepped_on(name: str, looks: bool, is_scaled: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    if is_scaled:  # on GPUs mixed precision brings one
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    layer = torch.nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(layer, parameter_groups.build_optimizer(OptimRecipe(name=name, lr=0.01), layer))
    steps = Steps(accelerator, model, optimizer, clip_norm=None, spikes=SpikeGuard(FACTOR), looks=looks)
    for step in range(1, 81):
        before = layer.weight.clone()
        factor = {70: 1e12, 75: math.inf if is_scaled else 1e12}.get(step, 1.0)
        steps.backward(model(torch.randn(5, 4)).square().mean() * factor, 1.0)
        taken = steps.take(0.01)
        assert bool(taken.skipped) == torch.equal(layer.weight, before) == (step in (70, 75))
        assert step != 70 or "a spike from" in steps.verdict
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        assert counts == [step - (step >= 70) - (step >= 75)] * len(counts)
    assert float(taken.grad_norm) < 100
    if is_scaled:
        assert accelerator.scaler.get_scale() == 4.0, "a spike is no overflow"


# Real runs -------------------------------------------------------------------------------------------------------------------


def go(preset: str, processes: int, folder: Path, bad_pass: int, *arguments: str) -> list[dict[str, Any]]:
    """Train; the loss of one pass of the last rank is a hundred million times what it should be."""
    environment = {"BAD_RANK": str(processes - 1), "BAD_PASS": str(bad_pass), "BAD_FACTOR": "1e8"}
    command = (str(SCRIPTS / "bad_batch.py"), "--run-dir", str(folder), "--trackers", "none", *RECIPE, *arguments)
    run(preset, processes, *command, env=environment).check()
    assert read(folder / "run.json")["world_size"] == processes
    return read_lines(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    lines = go("cpu", 1, folder, 2 * SPIKE, "train.max_micro_batch=32")
    assert read(folder / "run.json")["accumulation"] == 2
    norms = [line["grad_norm"] for line in lines]
    assert [line["skipped_steps"] for line in lines] == [[SPIKE] if line["step"] == SPIKE else [] for line in lines]
    assert norms[SPIKE - 1] > 1e4 * max(norms[: SPIKE - 1])
    assert math.isfinite(norms[SPIKE - 1])
    assert lines[SPIKE - 1]["loss"] is None
    each = read_lines(folder / "steps.jsonl")
    assert [line["gradient_norm"] for line in each] == norms
    assert [line["loss"] for line in each if not line["skipped"]] == [line["loss"] for line in lines if line["loss"]]
    assert each[SPIKE - 1]["skipped"]
    assert each[SPIKE - 1]["loss"] > 1e4
    assert lines[-1]["loss"] < 0.5
    return folder


def assert_same(folder: Path, reference: Path, *, after: int = 0) -> None:
    lines, expected = (
        [line for line in read_lines(place / "metrics.jsonl") if line["step"] > after] for place in (folder, reference)
    )
    assert [line["skipped_steps"] for line in lines] == [line["skipped_steps"] for line in expected]
    losses = [[line["loss"] for line in of_run if line["step"] != SPIKE] for of_run in (lines, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert read(folder / "result.json")["test_loss"] == pytest.approx(read(reference / "result.json")["test_loss"], rel=1e-5)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "resumed"),
    [
        ("multi_gpu", "deepspeed_zero3"),
        ("deepspeed_zero2", "fsdp2"),
        pytest.param("fsdp2", "deepspeed_zero3_offload", marks=pytest.mark.slow),
    ],
)
def test_the_same_step_is_left_out_under_every_strategy_and_after_a_resume(
    alone: Path, tmp_path: Path, preset: str, resumed: str
) -> None:
    go(preset, 2, tmp_path / "whole", SPIKE)
    assert_same(tmp_path / "whole", alone)
    saved = step_folders.path_of(tmp_path / "whole", SAVED)
    go(resumed, 2, tmp_path / "resumed", SPIKE - SAVED, "--resume", str(saved))
    assert_same(tmp_path / "resumed", alone, after=SAVED)
