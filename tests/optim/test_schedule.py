"""The learning rate of a step and the length of a run, against schedulers of torch and transformers, and as properties."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler

from app.errors import DataError, RecipeError
from app.optim.schedule import USED_KEYS, Length, length_in_steps, lr_at, notes_on
from app.recipe import recipe_file
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


# transformers -----------------------------------------------------------------------------------------------------------------

STEPS = 100
OF_TRANSFORMERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("cosine", {}, {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"final_lr_ratio": 0.1}),
    ("linear", {}, {"schedule": "linear"}),
    ("polynomial", {"power": 2.5, "lr_end": 0.03}, {"schedule": "polynomial", "power": 2.5, "final_lr_ratio": 0.1}),
    ("inverse_sqrt", {}, {"schedule": "inverse_sqrt"}),
    ("constant_with_warmup", {}, {"schedule": "constant"}),
    *(("warmup_stable_decay", {"num_decay_steps": 31, "decay_type": theirs},
       {"schedule": "wsd", "decay_steps": 31, "decay_type": ours})
      for theirs, ours in (("linear", "linear"), ("1-sqrt", "sqrt"), ("cosine", "cosine"))),
]  # fmt: skip


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize(("name", "settings", "keys"), OF_TRANSFORMERS)
def test_rates_are_those_of_transformers_and_a_step_ahead_in_the_warmup(name, settings, keys, warmup_steps):
    sizes = {"num_warmup_steps": warmup_steps, "num_training_steps": STEPS, "scheduler_specific_kwargs": settings}
    theirs = torch_rates(lambda optimizer: get_scheduler(name, optimizer, **sizes), peak=0.3, total_steps=STEPS)
    found = rates(OptimRecipe(lr=0.3, warmup_steps=warmup_steps, **keys), total_steps=STEPS)
    assert found == pytest.approx([*theirs[1 : warmup_steps + 1], *theirs[warmup_steps:]], rel=1e-12)


def test_every_name_of_transformers_is_a_schedule_or_answered() -> None:
    """All but restarts, and two that depend on the loss."""
    unknown = {"cosine_with_restarts", "reduce_lr_on_plateau", "greedy"}
    for name in {it.value for it in TYPE_TO_SCHEDULER_FUNCTION} - USED_KEYS.keys():
        words = "expected one of cosine, linear, wsd" if name in unknown else r"give optim\.schedule=(cosine|wsd|constant) and "
        with pytest.raises(RecipeError, match=words):
            recipe_file.load("digits", [f"optim.schedule={name}"])


def published_wsd(step: int, *, peak: float, warmup: int, total: int, decay: int, ratio: float) -> float:
    """Equation 1 of Hagele et al. 2024 with 1 - sqrt, down to a share of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = max(0.0, (step - (total - decay)) / decay)
    return peak * (ratio + (1 - ratio) * (1 - math.sqrt(done)))


def published_inverse_sqrt(step: int, *, peak: float, warmup: int) -> float:
    """Equation 3 of Vaswani et al. 2017, scaled to the peak; after the warm-up a step behind, as in transformers."""
    number = step + 1 if step < warmup else step
    return peak * math.sqrt(warmup) * min(number**-0.5, number * warmup**-1.5)


def test_wsd_and_inverse_sqrt_are_those_of_their_papers() -> None:
    wsd = OptimRecipe(lr=0.3, schedule="wsd", warmup_steps=7, decay_steps=20, final_lr_ratio=0.1)
    sizes = {"peak": 0.3, "warmup": 7}
    expected = [published_wsd(step, **sizes, total=STEPS, decay=20, ratio=0.1) for step in range(STEPS)]
    assert rates(wsd, total_steps=STEPS) == pytest.approx(expected, rel=1e-12)
    assert rates(wsd, total_steps=STEPS) == rates(replace(wsd, decay_steps=None), total_steps=STEPS), "a fifth of the run"
    inverse = rates(OptimRecipe(lr=0.3, schedule="inverse_sqrt", warmup_steps=7), total_steps=STEPS)
    assert inverse == pytest.approx([published_inverse_sqrt(step, **sizes) for step in range(STEPS)], rel=1e-12)


@pytest.mark.parametrize("schedule", [name for name, keys in USED_KEYS.items() if "schedule_steps" in keys])
def test_a_schedule_that_ends_before_the_run_keeps_its_final_rate(schedule: Any) -> None:
    optim = OptimRecipe(lr=0.3, schedule=schedule, warmup_steps=7, final_lr_ratio=0.1)
    shorter, found = rates(optim, total_steps=100), rates(replace(optim, schedule_steps=100), total_steps=130)
    assert found == [*shorter, *[pytest.approx(0.03, rel=1e-12)] * 30]
    old = recipe_file.load("digits", [f"optim.schedule={schedule}", "optim.cosine_steps=100"]).recipe.optim
    assert old.schedule_steps == 100, "the name that the key had"


def test_keys_that_do_nothing_are_noted() -> None:
    optim = OptimRecipe(schedule="wsd", warmup_steps=90, decay_steps=20, power=2.0)
    assert notes_on(optim, Length(10, 100)) == [
        "optim.power is 2.0, which optim.schedule=wsd does not use",
        "optim.decay_steps is 20, and 10 steps are left after the warm-up: the decay begins at its end",
    ]
    assert rates(optim, total_steps=100)[90:92] == [1e-3, pytest.approx(1e-3 * (1 - math.sqrt(0.1)), rel=1e-12)]


optim_recipes = st.builds(
    OptimRecipe,
    lr=st.floats(1e-6, 10),
    lr_reference_batch=st.none() | st.integers(1, 1024),
    schedule=st.sampled_from([*USED_KEYS]),
    warmup_steps=st.none() | st.integers(0, 300),
    final_lr_ratio=st.floats(0, 1),
    decay_epochs=st.lists(st.floats(0.5, 20), min_size=1, max_size=3).map(tuple),
    decay_factor=st.floats(0.01, 1),
    decay_steps=st.none() | st.integers(1, 300),
    decay_type=st.sampled_from(["linear", "sqrt", "cosine"]),
    power=st.floats(0.1, 4),
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
