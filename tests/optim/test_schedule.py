"""The learning rate of a step and the length of a run, against torch's own schedulers and as properties."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from app.errors import DataError, RecipeError
from app.optim.schedule import Length, first_step_by_length, length_in_steps, lr_at
from app.recipe.schema import OptimRecipe, TrainRecipe


def rates(optim: OptimRecipe, *, total_steps: int, steps_per_epoch: int = 10, global_batch_size: int = 64) -> list[float]:
    sizes = {"global_batch_size": global_batch_size, "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    return [lr_at(step, optim=optim, **sizes) for step in range(total_steps)]


def torch_rates(make, *, peak: float, total_steps: int) -> list[float]:
    """The rates of a torch scheduler: the reference."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler: LRScheduler = make(optimizer)
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warm_then(after, *, steps: int):
    def make(optimizer):
        warm_up = LinearLR(optimizer, start_factor=1 / steps, end_factor=1.0, total_iters=steps - 1)
        return SequentialLR(optimizer, [warm_up, after(optimizer)], milestones=[steps])

    return make


@pytest.mark.parametrize(
    ("optim", "steps", "of_torch"),
    [
        (OptimRecipe(lr=0.075, lr_reference_batch=16), 50, lambda optimizer: CosineAnnealingLR(optimizer, T_max=50)),
        (
            OptimRecipe(lr=0.3, warmup_steps=7, final_lr_ratio=0.1),
            100,
            warm_then(lambda optimizer: CosineAnnealingLR(optimizer, T_max=93, eta_min=0.03), steps=7),
        ),
        (
            OptimRecipe(lr=0.3, schedule="step", decay_epochs=(3, 6, 8), decay_factor=0.1),
            90,
            lambda optimizer: MultiStepLR(optimizer, [30, 60, 80], gamma=0.1),
        ),
    ],
)
def test_rates_are_those_of_torch(optim, steps, of_torch):
    assert rates(optim, total_steps=steps) == pytest.approx(torch_rates(of_torch, peak=0.3, total_steps=steps), rel=1e-9)


def test_a_cosine_that_ends_before_the_run_keeps_its_final_rate():
    optim = OptimRecipe(lr=0.3, schedule="cosine", warmup_steps=7, final_lr_ratio=0.1)
    shorter, found = rates(optim, total_steps=100), rates(replace(optim, cosine_steps=100), total_steps=130)
    assert found == [*shorter, *[pytest.approx(0.03, rel=1e-12)] * 30]
    assert first_step_by_length(replace(optim, cosine_steps=100), steps_per_epoch=10) is None


optim_recipes = st.builds(
    OptimRecipe,
    lr=st.floats(1e-6, 10),
    lr_reference_batch=st.none() | st.integers(1, 1024),
    schedule=st.sampled_from(["cosine", "step", "constant"]),
    warmup_steps=st.none() | st.integers(0, 300),
    final_lr_ratio=st.floats(0, 1),
    decay_epochs=st.lists(st.floats(0.5, 20), min_size=1, max_size=3).map(tuple),
    decay_factor=st.floats(0.01, 1),
)


@given(optim=optim_recipes, total_steps=st.integers(1, 200), batch=st.integers(1, 4096))
def test_between_zero_and_the_peak_and_never_up_after_the_warmup(optim, total_steps, batch):
    peak = optim.lr * batch / optim.lr_reference_batch if optim.lr_reference_batch else optim.lr
    found = rates(optim, total_steps=total_steps, global_batch_size=batch)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in found)
    warm_up = optim.warmup_steps or 0
    assert found[:warm_up] == sorted(found[:warm_up])
    assert found[warm_up:] == sorted(found[warm_up:], reverse=True)
    if warm_up < total_steps:
        assert math.isclose(found[warm_up], max(found)) or optim.schedule == "step"


@pytest.mark.parametrize(("train", "steps"), [(TrainRecipe(epochs=3), 45), (TrainRecipe(steps=7), 7), (TrainRecipe(), 150)])
def test_length(train, steps):
    assert length_in_steps(train, dataset_size=1000, global_batch_size=64) == Length(15, steps)


def test_data_smaller_than_one_global_batch():
    with pytest.raises(DataError, match=r"63 samples.*has 64.*train\.global_batch_size to 63"):
        length_in_steps(TrainRecipe(epochs=1), dataset_size=63, global_batch_size=64)
    for end, words in ((22, r"is \[\[1, 22\]\], and the run has 20 steps"), (21, r"is \[\[1, 21\]\], all 20 steps of the run")):
        with pytest.raises(RecipeError, match=words):
            length_in_steps(TrainRecipe(epochs=2, skip_steps=((1, end),)), dataset_size=640, global_batch_size=64)
