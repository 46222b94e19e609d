from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import RecipeError
from app.recipe.recipe_file import digest, load
from app.recipe.schema import BatchPlan, Recipe, TrainRecipe

PLAIN, MIXED = load("digits").recipe, load("digits", ["augment.mixup=0.2"]).recipe


def recipe(size: int, max_micro_batch: Any = None, base: Recipe = PLAIN) -> Recipe:
    return replace(base, train=TrainRecipe(global_batch_size=size, max_micro_batch=max_micro_batch))


@given(
    groups=st.integers(1, 256),
    world_size=st.integers(1, 64),
    max_micro_batch=st.none() | st.integers(2, 64),
    base=st.sampled_from([PLAIN, MIXED]),
)
def test_a_plan_divides_the_global_batch_or_says_why_not(
    groups: int, world_size: int, max_micro_batch: int | None, base: Recipe
) -> None:
    group_size = base.sections.group_size
    asked = recipe(groups * group_size, max_micro_batch, base)
    # By trying everything: the largest micro-batch that divides the share of a process and keeps the conditions.
    size = groups * group_size
    shares = [micro for micro in range(1, size + 1) if size % (world_size * micro) == 0]
    fitting = [micro for micro in shares if micro <= (max_micro_batch or micro) and micro % group_size == 0]
    if fitting:
        plan = BatchPlan.of(asked, world_size)
        assert plan.micro_batch == max(fitting)
        assert plan.micro_batch * plan.accumulation * plan.data_ranks == size
    else:
        with pytest.raises(RecipeError, match=f"which {world_size} processes cannot split"):
            BatchPlan.of(asked, world_size)


def test_an_automatic_micro_batch_has_no_other_limit_than_was_found() -> None:
    asked = recipe(64, "auto")
    assert str(BatchPlan.of(asked, 1)) == "global batch 64 = micro-batch 64 (auto) x accumulation 1 x 1 process"
    assert BatchPlan.of(asked, 1).passes == 2  # the next start may take several
    assert (BatchPlan.of(asked, 2, most=20).micro_batch, BatchPlan.of(recipe(64, 32), 2, most=20).micro_batch) == (16, 32)
    assert digest(asked) == digest(recipe(64))


def test_processes_that_compute_together_are_one_rank() -> None:
    plan = BatchPlan.of(recipe(64, 16), 2, processes_per_rank=4)
    assert (plan.micro_batch, plan.passes) == (16, 4)
    assert str(plan) == "global batch 64 = micro-batch 16 x accumulation 2 x 2 data-parallel ranks of 4 processes"
    refusal = "which 3 data-parallel ranks of 2 processes .*: use 2, 4, 8, 16, 32, 64, 128 processes, .*a multiple of 3"
    with pytest.raises(RecipeError, match=refusal):
        BatchPlan.of(recipe(64), 3, processes_per_rank=2)
