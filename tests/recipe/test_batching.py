from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan


@given(
    global_batch_size=st.integers(1, 512),
    world_size=st.integers(1, 64),
    max_micro_batch=st.none() | st.integers(1, 64),
    group_size=st.integers(1, 3),
)
def test_a_plan_divides_the_global_batch_or_says_why_not(
    global_batch_size: int, world_size: int, max_micro_batch: int | None, group_size: int
) -> None:
    asked = {"global_batch_size": global_batch_size, "max_micro_batch": max_micro_batch, "group_size": group_size}
    # By trying everything: the largest micro-batch that divides the share of a process and keeps the conditions.
    shares = [micro for micro in range(1, global_batch_size + 1) if global_batch_size % (world_size * micro) == 0]
    fitting = [micro for micro in shares if micro <= (max_micro_batch or micro) and micro % group_size == 0]
    if fitting:
        plan = BatchPlan.fit(data_ranks=world_size, **asked)
        assert plan.micro_batch == max(fitting)
        assert plan.micro_batch * plan.accumulation * plan.data_ranks == global_batch_size
    else:
        hopeless = max_micro_batch is not None and max_micro_batch < group_size
        why = (
            f"set train.max_micro_batch to {group_size} or more" if hopeless else f"which {world_size} processes cannot divide"
        )
        with pytest.raises(RecipeError, match=why):
            BatchPlan.fit(data_ranks=world_size, **asked)


def test_the_refusal_names_world_sizes_that_do() -> None:
    with pytest.raises(RecipeError, match="use 1, 2, 4, 8, 16, 32 processes") as refusal:
        BatchPlan.fit(global_batch_size=64, data_ranks=3)
    assert "a multiple of 3" in str(refusal.value)
    for size in (1, 2, 4, 8, 16, 32):
        BatchPlan.fit(global_batch_size=64, data_ranks=size)


def test_mixing_pairs_needs_even_micro_batches() -> None:
    assert BatchPlan.fit(global_batch_size=64, data_ranks=2, max_micro_batch=9, group_size=2).micro_batch == 8
    mixed = recipe_file.load("digits", ["augment.mixup=0.2"]).recipe
    assert BatchPlan.of(mixed, 32).micro_batch == 2
    with pytest.raises(RecipeError, match=r"a multiple of 2 \(augment\.mixup and augment\.cutmix mix pairs"):
        BatchPlan.of(mixed, 64)


def test_processes_that_compute_together_are_one_rank() -> None:
    plan = BatchPlan.fit(global_batch_size=64, data_ranks=2, tensor_parallel=4, max_micro_batch=16)
    assert (plan.micro_batch, plan.passes) == (16, 4)
    assert str(plan) == "global batch 64 = micro-batch 16 x accumulation 2 x 2 data-parallel ranks of 4 processes"
    with pytest.raises(RecipeError, match=r"which 3 data-parallel ranks of 2 processes .*: use 2, 4, 8, 16, 32, 64 pro"):
        BatchPlan.fit(global_batch_size=64, data_ranks=3, tensor_parallel=2)
