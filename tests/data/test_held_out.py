"""Samples that are held out: with the rest they are all samples, each once, and a seed alone decides which they are."""

from __future__ import annotations

import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.data.draws import HostDraws
from app.data.samples import Splits, first_of, hold_out
from app.errors import DataError, RecipeError


class Numbers:
    """As many samples as asked for, each its own number, of which each counts as much as it is."""

    facts: ClassVar = {"kind": "numbers"}
    fingerprint = "abc"
    workers, is_array = False, True

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, torch.Tensor]:
        assert draw is None
        return {"numbers": torch.from_numpy(indices)}

    def count(self, indices: np.ndarray) -> np.ndarray:
        return indices


def numbers_of(samples: Numbers) -> list[int]:
    indices = np.arange(len(samples))
    found: list[int] = samples.fetch(indices, None)["numbers"].tolist()
    assert samples.count(indices).tolist() == found
    return found


@given(size=st.integers(2, 400), share=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
def test_the_two_parts_are_all_samples_and_a_function_of_the_seed(size: int, share: float, seed: int) -> None:
    if not 0 < round(share * size) < size:
        return
    parts = hold_out(Splits(Numbers(size), None, None), share, seed=seed)
    validation, train = numbers_of(parts.validation), numbers_of(parts.train)
    assert len(validation) == round(share * size)
    assert sorted(validation + train) == list(range(size))
    again = hold_out(Splits(Numbers(size), None, None), share, seed=seed)
    assert again.facts == parts.facts
    assert numbers_of(pickle.loads(pickle.dumps(again.validation))) == validation
    assert numbers_of(first_of(parts.validation, 5, seed=seed)) == validation[:5]


def test_other_seeds_hold_out_others_and_what_is_not_asked_is_as_before() -> None:
    data = Splits(Numbers(1000), None, Numbers(10))
    one, other = (hold_out(data, 0.1, seed=seed) for seed in (0, 1))
    assert len(set(numbers_of(one.validation)) & set(numbers_of(other.validation))) < 30
    assert one.facts["training data"] != other.facts["training data"]
    assert hold_out(data, None, seed=0) is data
    assert (one.train.facts, one.train.is_array, one.train.workers) == (Numbers.facts, True, False)
    assert len(numbers_of(first_of(data.test, 4, seed=0))) == 4
    assert first_of(data.test, 10, seed=0) is data.test


def test_what_cannot_be_held_out_is_one_sentence() -> None:
    with pytest.raises(RecipeError, match=r"the data has a validation split: set it to null"):
        hold_out(Splits(Numbers(9), Numbers(3), None), 0.5, seed=0)
    with pytest.raises(DataError, match=r"train\.validation_fraction is 0\.01, 0 of 9 training samples"):
        hold_out(Splits(Numbers(9), None, None), 0.01, seed=0)
