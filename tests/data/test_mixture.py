"""A mixture's order: exact shares in each window, each row once in a pass, and no sample depends on how it is reached."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.draws import HostDraws
from app.data.mixture import LARGEST_WINDOW_SAMPLES, Mixture, MixtureOrder
from app.data.samples import Samples, Splits, first_of, hold_out, without_hold_out
from app.errors import DataError

WEIGHTS = st.integers(1, 4).flatmap(lambda sources: st.lists(st.integers(0, 50), min_size=sources, max_size=sources))


@dataclass
class Rows:
    """As many samples as asked for: each has its source and its row, a random number, and a count of row + 1."""

    source: int
    size: int
    facts: ClassVar = {"kind": "rows"}
    workers, is_array = False, True

    @property
    def fingerprint(self) -> str:
        return f"rows {self.source}"

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, torch.Tensor]:
        drawn = np.zeros(len(indices), np.float32) if draw is None else draw.uniform("x")
        place = np.stack([np.full_like(indices, self.source), indices], 1)
        return {"place": torch.from_numpy(place), "drawn": torch.from_numpy(drawn)}

    def count(self, indices: np.ndarray) -> np.ndarray:
        return indices + 1


def mixture(*sizes: int, **given: object) -> Mixture:
    return Mixture(sources={f"s{number}": Rows(number, size) for number, size in enumerate(sizes)}, **given)


def places(samples: Mixture, numbers: np.ndarray) -> list[tuple[int, int]]:
    return [(source, row) for source, row in samples.fetch(numbers, None)["place"].tolist()]


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Any weights, sizes and phases, ordered in steps of 5 samples."""
    weights = draw(WEIGHTS.filter(any))
    sizes = [draw(st.sampled_from((1, 2, 3, 7, 60, 10**6))) for _ in weights]
    steps = sorted(draw(st.sets(st.integers(2, 60), max_size=2)))
    phases = {step: draw(st.permutations(weights)) for step in steps}
    least = min(filter(None, weights))
    window = draw(st.integers(-(-sum(weights) // least), -(-sum(weights) // least) + 40))
    found = mixture(*sizes, weights=weights, window=window, phases=phases)
    return found.ordered(seed=draw(st.integers(0, 2**63 - 1)), global_batch_size=5, steps=70)


@settings(max_examples=30)  # of 0.1 s each
@given(mixed=mixtures())
def test_shares_are_exact_in_each_window_and_each_row_comes_once_in_a_pass(mixed: Mixture) -> None:
    order, numbers = mixed.order, np.arange(350)
    assert order is not None
    sources, _ = order.locate(numbers)
    begins = [0, *(5 * (step - 1) for step in mixed.phases), 350]
    for begin, end, weights in zip(begins, begins[1:], (mixed.weights, *mixed.phases.values()), strict=False):
        for first in range(begin, end - mixed.window + 1, mixed.window):  # a window that a phase ends has what it had by then
            of_window = np.bincount(sources[first : first + mixed.window], minlength=len(weights))
            rests = of_window - np.array(weights) * mixed.window / sum(weights)
            assert of_window.sum() == mixed.window
            assert (np.abs(rests) < 1).all()
            assert max(-rests) <= 1 - max(rests) + 1e-9, "another source had the larger remainder"
    found = places(mixed, numbers)
    for number, samples in enumerate(mixed.sources.values()):
        assert order.counts_before(333)[number] == (sources[:333] == number).sum()
        rows = [row for source, row in found if source == number]
        for start in range(0, len(rows), len(samples)):
            one_pass = rows[start : start + len(samples)]
            assert len({*one_pass}) == len(one_pass)
            assert max(one_pass) < len(samples)


@settings(max_examples=30)  # of 0.1 s each
@given(mixed=mixtures(), chosen=st.lists(st.integers(0, 349), min_size=1, max_size=20))
def test_a_sample_is_the_same_however_it_is_reached(mixed: Mixture, chosen: list[int]) -> None:
    every = places(mixed, np.arange(350))
    assert places(mixed, np.array(chosen)) == [every[number] for number in chosen]
    assert mixed.places(np.array(chosen)) == [(f"s{source}", row) for source, row in (every[number] for number in chosen)]
    assert places(pickle.loads(pickle.dumps(mixed)), np.array(chosen)) == [every[number] for number in chosen]
    draws = HostDraws(3, np.arange(350))
    fetched = mixed.fetch(np.array(chosen), draws.at(np.array(chosen)))
    assert fetched["drawn"].tolist() == [draws.uniform("x")[number] for number in chosen]
    longer = Mixture(**{**vars(mixed), "phases": {**mixed.phases, 65: mixed.weights}, "order": None})
    other = longer.ordered(seed=mixed.order.seed, global_batch_size=5, steps=1000)  # type: ignore[union-attr]
    assert places(other, np.arange(5 * 64)) == every[: 5 * 64], "what comes before a phase depends on it"


@settings(max_examples=30)  # of 0.1 s each
@given(mixed=mixtures())
def test_each_step_has_the_counts_of_its_samples(mixed: Mixture) -> None:
    steps = np.arange(100, 350).reshape(-1, 5)
    expected = {name: [0] * len(steps) for name in mixed.sources}
    for step, numbers in enumerate(steps):
        for source, row in places(mixed, numbers):
            expected[f"s{source}"][step] += row + 1
    assert mixed.by_source(steps) == expected
    assert mixed.count is not None
    assert mixed.count(steps.ravel()).reshape(-1, 5).sum(1).tolist() == np.sum([*expected.values()], 0).tolist()


def test_the_last_samples_of_a_long_run_over_large_sources_cost_what_the_first_ones_do() -> None:
    mixed = mixture(10, 1000, 10**12, weights=[0.7, 0.2, 0.1], phases={10**9: [1, 1, 1]})
    mixed = mixed.ordered(seed=1, global_batch_size=1000, steps=2 * 10**9)
    last = np.arange(2 * 10**12 - 1000, 2 * 10**12)
    found = places(mixed, last)
    assert {source for source, _ in found} == {0, 1, 2}
    assert len({row for source, row in found if source == 2}) == sum(source == 2 for source, _ in found)
    assert isinstance(mixed.order, MixtureOrder)
    exact = (10**12 - 1000) * np.array([0.7, 0.2, 0.1]) + (10**12 + 1000) / 3
    windows = 2 * 10**12 / mixed.window
    assert np.abs(mixed.order.counts_before(2 * 10**12) - exact).max() < windows


def test_passes_over_a_source_have_other_orders_and_sources_of_one_size_too() -> None:
    mixed = mixture(50, 50, weights=[1, 1], window=100).ordered(seed=0, global_batch_size=100, steps=3)
    rows = [[row for source, row in places(mixed, np.arange(100 * step, 100 * step + 100)) if source == chosen]
            for step in range(3) for chosen in (0, 1)]  # fmt: skip
    assert [sorted(it) for it in rows] == [[*range(50)]] * 6
    assert len({tuple(it) for it in rows}) == 6


def test_without_an_order_these_are_all_samples_of_the_sources() -> None:
    mixed = mixture(3, 2, weights=[1, 9], phases={5: [1, 1]})
    assert places(mixed, np.array([4, 0, 2, 3])) == [(1, 1), (0, 0), (0, 2), (1, 0)]
    assert len(mixed) == 5
    assert len(first_of(mixed, 4, seed=0)) == 4
    assert mixed.name(3) == "s1 0"


def test_validation_holds_out_a_share_of_each_source() -> None:
    data = hold_out(Splits(mixture(10, 200, weights=[1, 1]), None, None), 0.1, seed=4)
    held = {name: len(part) for name, part in data.validation.sources.items()}
    assert held == {"s0": 1, "s1": 20}
    trained = data.train.ordered(seed=4, global_batch_size=65_536, steps=1)
    numbers = np.arange(65_536)
    assert {*places(trained, numbers)}.isdisjoint(places(data.validation, np.arange(21)))
    assert len({*places(trained, numbers)}) == 9 + 180
    assert without_hold_out(data).train == mixture(10, 200, weights=[1, 1])
    assert data._replace(train=trained).facts.keys() == {
        "training mixture", "training data of s0", "training data of s1", "validation data of s0", "validation data of s1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weights": [1]}, r"the weights are \[1\]: give a number of 0 or more for each of 2 sources"),
        ({"weights": [1, -1]}, "give a number of 0 or more"),
        ({"weights": [1, float("nan")]}, "give a number of 0 or more"),
        ({"weights": [0, 0]}, "all weights are 0: give one that is greater"),
        ({"weights": [1, 1e-6]}, "the share of source 2 is less than a sample in a window of 65,536"),
        ({"weights": [1, 1], "phases": {9: [1, 1, 1]}}, r"the weights are \[1, 1, 1\]"),
        ({"weights": [1, 1], "phases": {9: [1, 2], 3: [2, 1]}}, r"begin with the steps \[9, 3\]"),
        ({"weights": [1, 1], "phases": {1: [1, 2]}}, "give ascending steps, 2 or more"),
        ({"weights": [1, 1], "window": LARGEST_WINDOW_SAMPLES + 1}, "has a window of 1048577 samples"),
    ],
)
def test_what_is_no_mixture_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Samples.mix([Rows(0, 1), Rows(1, 1)], **given)  # type: ignore[arg-type]


def test_sources_with_other_fields_are_refused() -> None:
    sources = {"a": Samples.of({"x": np.zeros((4, 2))}), "b": Samples.of({"x": np.zeros((4, 3))})}
    mixed = Samples.mix(sources, [1, 1], window=2).ordered(seed=0, global_batch_size=2, steps=1)
    with pytest.raises(
        DataError, match=r"b has the fields {'x': \('torch.float64', 3\)}, and another source of the mixture {'x'"
    ):
        mixed.fetch(np.arange(2), None)
