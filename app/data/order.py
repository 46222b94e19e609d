"""The order of the samples over the whole run, as a function of (dataset size, seed, global batch size) alone.

A random number here is a hash of what it is for (seed, epoch, sample, purpose), never the next value of a generator: no
state to save, and the same value in any process. Python's own `hash` changes from process to process and is not used.

`mix64` is the output function of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
with the constants of Stafford's "Mix13" as in Vigna's https://prng.di.unimi.it/splitmix64.c): a bijection of 64-bit
numbers in which every input bit moves every output bit. Standard library only.

A *sample number* is epoch * size + index: it names one sample of one epoch. The order of an epoch is a keyed permutation
of 0..size-1 that is computed where it is needed, without a table: memory does not grow with the dataset, and starting at
step 10**9 costs what starting at step 0 costs. Nothing here knows how many processes there are: the samplers yield
global micro-batches, of which Accelerate deals contiguous pieces to the ranks (`split_batches=True`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from app.errors import RecipeError

MASK64 = 2**64 - 1
GOLDEN64 = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: splitmix64's increment, which keeps mix64 off its fixed point 0
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Return a hash in 0..2**64-1 of `value`, of which the lowest 64 bits count."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * MIX_FIRST) & MASK64
    value = ((value ^ (value >> 27)) * MIX_SECOND) & MASK64
    return value ^ (value >> 31)


def mix64_array(values: Any) -> Any:
    """Return `mix64` of each number of a NumPy array uint64 [n], in its memory."""
    values ^= values >> 30
    values *= MIX_FIRST
    values ^= values >> 27
    values *= MIX_SECOND
    values ^= values >> 31
    return values


@lru_cache(maxsize=1024)
def derive_key(seed: int, *words: int | str) -> int:
    """Return a key in 0..2**64-1 that depends on the seed and on each word and its place."""
    key = mix64(seed + GOLDEN64)
    for word in words:
        key = mix64((key ^ (word if isinstance(word, int) else _number_of(word))) + GOLDEN64)
    return key


def _number_of(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


# Four rounds make a Feistel network pseudorandom if the round function is (Luby and Rackoff 1988); ours is only a good
# hash and the halves of small sets are tiny, so twice as many. Each costs about 5 ns a sample.
_ROUNDS = 8
# Positions permuted at a time: enough to forget NumPy's cost per call, few enough to stay in the processor's cache.
_BLOCK_POSITIONS = 16_384


def permute(
    positions: NDArray[np.int64], *, size: int, seed: int, epoch: int | NDArray[np.int64], purpose: str = "order"
) -> NDArray[np.int64]:
    """Return the indices int64 [n] at `positions` int64 [n] of the epoch's random order; both lie in 0..size-1.

    `epoch` may be int64 [n], one for each position. Each `purpose` has orders of its own.

    The set 0..a*b-1, with a and b just above the square root of size, is permuted by a Feistel network on the two digits
    of a number in mixed radix (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). What leaves 0..size-1 is
    sent through again until it comes back ("cycle walking", same source), which keeps it a bijection. a*b exceeds size by
    less than a, so one number in about sqrt(size) has to walk.
    """
    assert 0 < size <= 2**62, size
    keys = _round_keys(seed, purpose, epoch)
    high_radix = math.isqrt(size - 1) + 1
    low_radix = -(-size // high_radix)
    numbers = _feistel(positions.astype(np.uint64), high_radix, low_radix, keys)
    while (outside := np.flatnonzero(numbers >= size)).size:
        walking = [key[outside] if key.ndim else key for key in keys]
        numbers[outside] = _feistel(numbers[outside], high_radix, low_radix, walking)
    return numbers.view(np.int64)


def _round_keys(seed: int, purpose: str, epoch: int | NDArray[np.int64]) -> list[Any]:
    """Return `derive_key(seed, purpose, epoch, round)` of each round, uint64: scalars, or [n] for epochs [n]."""
    if isinstance(epoch, int):
        return [np.uint64(derive_key(seed, purpose, epoch, round_)) for round_ in range(_ROUNDS)]
    base, increment = np.uint64(derive_key(seed, purpose)), np.uint64(GOLDEN64)
    of_epochs = mix64_array((epoch.astype(np.uint64) ^ base) + increment)
    return [mix64_array((of_epochs ^ np.uint64(round_)) + increment) for round_ in range(_ROUNDS)]


def _feistel(numbers: NDArray[np.uint64], high_radix: int, low_radix: int, keys: list[Any]) -> NDArray[np.uint64]:
    """Return a permutation, chosen by the keys, of 0..high_radix*low_radix-1 at the given numbers."""
    high: NDArray[np.uint64] = numbers // np.uint64(low_radix)
    low: NDArray[np.uint64] = numbers - high * np.uint64(low_radix)
    for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
        high = _add_modulo(high, _hash_below(low, high_radix, high_key), high_radix)
        low = _add_modulo(low, _hash_below(high, low_radix, low_key), low_radix)
    high *= np.uint64(low_radix)
    high += low
    return high


def _hash_below(values: NDArray[np.uint64], bound: int, key: Any) -> NDArray[np.uint64]:
    """Return hashes in 0..bound-1 (bound <= 2**31): the upper half of mix64(values + key), scaled down."""
    mixed: NDArray[np.uint64] = mix64_array(values + key)
    mixed >>= np.uint64(32)
    mixed *= np.uint64(bound)
    mixed >>= np.uint64(32)
    return mixed


def _add_modulo(values: NDArray[np.uint64], terms: NDArray[np.uint64], modulus: int) -> NDArray[np.uint64]:
    """Return (values + terms) mod modulus for both in 0..modulus-1, in the memory of terms."""
    terms += values
    # A sum below the modulus wraps round to a huge number when the modulus is taken off, so the smaller one is right.
    np.minimum(terms, terms - np.uint64(modulus), out=terms)
    return terms


@dataclass(kw_only=True)
class TrainBatches:
    """Batch sampler of the steps first_step..last_step-1 of the run: yields global micro-batches of sample numbers.

    Step k is batch k mod E of epoch k // E, where E = size // global_batch_size: the incomplete last batch of an epoch is
    dropped. Its global batch comes as `micro_batches_per_step` contiguous pieces, int64 [batch_size] each, so the samples
    of a step in the order (piece, rank) are the same on every topology.

    Not `shuffled`, the sample numbers come in order, as for a mixture (`mixture.py`), which is in random order itself.
    """

    size: int
    seed: int
    global_batch_size: int
    micro_batches_per_step: int
    first_step: int
    last_step: int
    shuffled: bool = True
    drop_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size < self.global_batch_size:
            raise RecipeError(
                f"train.global_batch_size is {self.global_batch_size}, but the training set has {self.size} samples: an "
                f"epoch would not contain a full batch; set train.global_batch_size to {self.size} or less"
            )
        assert self.global_batch_size % self.micro_batches_per_step == 0, (self.global_batch_size, self.micro_batches_per_step)
        self.batch_size = self.global_batch_size // self.micro_batches_per_step
        self.steps_per_epoch = self.size // self.global_batch_size

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step) * self.micro_batches_per_step

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        steps_per_block = max(1, _BLOCK_POSITIONS // self.global_batch_size)
        step = self.first_step
        while step < self.last_step:
            epoch, batch = divmod(step, self.steps_per_epoch)
            num_batches = min(steps_per_block, self.steps_per_epoch - batch, self.last_step - step)
            positions = np.arange(batch * self.global_batch_size, (batch + num_batches) * self.global_batch_size)
            samples = permute(positions, size=self.size, seed=self.seed, epoch=epoch) if self.shuffled else positions
            samples += epoch * self.size
            yield from samples.reshape(-1, self.batch_size)
            step += num_batches


@dataclass(kw_only=True)
class EvalBatches:
    """Batch sampler of every index 0..size-1 once, in order: yields int64 [batch_size], the last filled up with -1."""

    size: int
    batch_size: int
    drop_last: ClassVar[bool] = True

    def __len__(self) -> int:
        return (self.size + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for start in range(0, self.size, self.batch_size):
            indices = np.arange(start, start + self.batch_size)
            indices[indices >= self.size] = -1
            yield indices
