"""64-bit hashing of integers and words: the root of every random choice in the data.

A random number here is a hash of what it is for (seed, epoch, sample, purpose), never the next value of a generator: no
state to save, and the same value in any process. Python's own `hash` changes from process to process and is not used.

`mix64` is the output function of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
with the constants of Stafford's "Mix13" as in Vigna's https://prng.di.unimi.it/splitmix64.c): a bijection of 64-bit
numbers in which every input bit moves every output bit. Standard library only.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

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
