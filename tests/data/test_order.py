"""The order of the samples: a bijection for every size and key, random to look at, and the same on every topology."""

import itertools
import tracemalloc

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from app.data.order import EvalBatches, TrainBatches, permute
from app.errors import RecipeError

seeds = st.integers(0, 2**63 - 1)


def whole(size, seed=0, epoch=0):
    return permute(np.arange(size), size=size, seed=seed, epoch=epoch)


def run(size=1000, **changes):
    usual = {"seed": 3, "global_batch_size": 24, "micro_batches_per_step": 1, "first_step": 0, "last_step": 100}
    return TrainBatches(size=size, **usual | changes)


def numbers_of(batches):
    return np.concatenate(list(batches))


@given(st.integers(1, 5000), seeds, st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_permutation_is_a_bijection_at_any_positions(size, seed, epoch):
    indices = whole(size, seed, epoch)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(size))
    positions = np.array([size - 1, size // 2, 0])
    assert np.array_equal(permute(positions, size=size, seed=seed, epoch=epoch), indices[positions])


def test_the_order_stays_what_it_is():
    """A change of these numbers changes every run: it needs a line in the changelog."""
    assert whole(10, seed=1, epoch=2).tolist() == FROZEN_TEN
    assert permute(np.array([0, 1, 10**12 - 1]), size=10**12, seed=1, epoch=2).tolist() == FROZEN_HUGE


def test_the_order_looks_random():
    size = 10_007
    positions, expected_displacement = np.arange(size), size / 3
    orders = [whole(size, seed=5, epoch=epoch) for epoch in range(4)] + [whole(size, seed=6)]
    for order in orders:
        deviation = size * np.sqrt(1 / 18 / size)  # of the mean of |x - y|, whose variance is size**2 / 18
        assert abs(np.abs(order - positions).mean() - expected_displacement) < 5 * deviation
        for lag in (1, 2, 3, 128, 129):
            assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / np.sqrt(size)
        # Neighbors in the order: how far apart is even too, seen modulo 16 and in 16 ranges.
        steps = (np.diff(order) % size).astype(np.int64)
        for cells in (steps % 16, steps * 16 // size, order[:-1] % 16, (order[: size // 2] * 16) // size):
            counts = np.bincount(cells, minlength=16)
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 45  # chi-square, 15 degrees: once in 10,000
    for one, other in itertools.combinations([positions, *orders], 2):
        assert (one == other).sum() < 10  # Poisson with mean 1
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)


@given(
    size=st.integers(24, 400),
    seed=seeds,
    micro_batches_per_step=st.sampled_from([1, 2, 3, 4, 6, 12]),
    first_step=st.integers(0, 60),
    num_steps=st.integers(0, 40),
)
@settings(max_examples=60)
def test_the_samples_of_a_step_depend_on_the_recipe_alone(size, seed, micro_batches_per_step, first_step, num_steps):
    last_step, pieces = first_step + num_steps, micro_batches_per_step
    undisturbed = numbers_of(run(size, seed=seed, last_step=101)).reshape(101, 24)
    resumed = run(size, seed=seed, micro_batches_per_step=pieces, first_step=first_step, last_step=last_step)
    batches = list(resumed)
    assert len(batches) == len(resumed) == num_steps * micro_batches_per_step
    assert all(batch.shape == (resumed.batch_size,) for batch in batches)
    assert [number for batch in batches for number in batch.tolist()] == undisturbed[first_step:last_step].ravel().tolist()


def test_batches_follow_the_permutation_across_blocks():
    """An epoch longer than the block the sampler permutes at a time, and a global batch longer than the block."""
    expected = whole(70_000, seed=3)
    assert np.array_equal(numbers_of(run(70_000, global_batch_size=99, last_step=707)), expected[: 707 * 99])
    assert np.array_equal(numbers_of(run(70_000, global_batch_size=35_000, last_step=2)), expected)
    assert np.array_equal(numbers_of(run(70_000, global_batch_size=99, first_step=707, last_step=708)) // 70_000, np.ones(99))


def test_going_on_at_sample_a_billion_of_a_huge_set_takes_no_memory():
    tracemalloc.start()
    try:
        batches = run(10**12, global_batch_size=256, first_step=10**9 // 256, last_step=10**15)
        numbers = [batch for batch, _ in zip(batches, range(100), strict=False)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = permute(np.arange(256) + 10**9 // 256 * 256, size=10**12, seed=3, epoch=0)
    assert np.array_equal(numbers[0], expected)
    assert peak_bytes < 4 * 2**20


def test_an_epoch_without_a_whole_batch_is_refused():
    with pytest.raises(RecipeError, match=r"train.global_batch_size is 24, but the training set has 23 samples") as refusal:
        run(size=23)
    assert "set train.global_batch_size to 23 or less" in str(refusal.value)


class Numbers:
    """A dataset that hands the sample numbers of a batch on."""

    def __len__(self):
        return 1000

    def __getitems__(self, numbers):
        return np.asarray(numbers)


@pytest.mark.parametrize(("world_size", "micro_batches_per_step", "num_workers"), [(3, 4, 0), (2, 2, 1)])
def test_accelerate_deals_the_same_steps_on_any_topology(world_size, micro_batches_per_step, num_workers):
    batches = run(last_step=45, micro_batches_per_step=micro_batches_per_step)
    loader = DataLoader(Numbers(), batch_sampler=batches, collate_fn=np.asarray, num_workers=num_workers)
    dealt = []
    for rank in range(world_size):
        prepared = prepare_data_loader(
            loader, num_processes=world_size, process_index=rank, split_batches=True, put_on_device=False, rng_types=[]
        )
        assert isinstance(prepared.batch_sampler, BatchSamplerShard)
        dealt.append(list(prepared))
    assert all(len(batches_of_rank) == 45 * micro_batches_per_step for batches_of_rank in dealt)
    in_order = np.concatenate([batch for same_slot in zip(*dealt, strict=True) for batch in same_slot])
    assert np.array_equal(in_order, numbers_of(run(last_step=45)))


# --- evaluation batches


@given(st.integers(1, 200), st.integers(1, 64))
def test_evaluation_sees_every_index_once_in_order(size, batch_size):
    batches = EvalBatches(size=size, batch_size=batch_size)
    numbers = list(batches)
    assert len(numbers) == len(batches)
    assert {len(batch) for batch in numbers} == {batch_size}
    flat = np.concatenate(numbers).tolist()
    assert flat[:size] == list(range(size))
    assert set(flat[size:]) <= {-1}
    assert len(flat) - size < batch_size


FROZEN_TEN = [6, 8, 5, 7, 2, 0, 3, 1, 4, 9]
FROZEN_HUGE = [170791111861, 895876284690, 671865124209]
