"""A user's samples: what they may leave out, what they return, and that they are the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from app.data.draws import HostDraws
from app.data.samples import Samples
from app.errors import DataError
from app.tasks.own.own_samples import OwnSamples, check_repeatable


class Own:
    """Samples with a fetch of one's own."""

    def __init__(self, fetch: Callable[[np.ndarray, Any], Any], size: int = 30) -> None:
        self.fetch, self._size = fetch, size

    def __len__(self) -> int:
        return self._size


def numbered(indices: np.ndarray, draw: HostDraws | None) -> dict[str, Any]:
    shift = 0 if draw is None else draw.uniform("shift")
    return {"x": indices[:, None].astype(np.float32), "y": torch.from_numpy(indices * 2.0 + shift)}


def test_what_is_left_out_is_there() -> None:
    samples = OwnSamples(Own(numbered), what="the training samples")
    assert (len(samples), samples.facts, samples.workers, samples.is_array) == (30, {}, False, False)
    assert {name: field.dtype for name, field in samples.fetch(np.arange(3), None).items()} == {
        "x": torch.float32,
        "y": torch.float64,
    }
    arrays = OwnSamples(Samples.of({"x": np.zeros((4, 2))}, facts={"k": [1]}), what="the training samples")
    assert (arrays.is_array, arrays.facts) == (True, {"k": [1]})


def test_a_fingerprint_tells_data_apart() -> None:
    def of(fetch: Callable[[np.ndarray, Any], Any], size: int = 30) -> str:
        return OwnSamples(Own(fetch, size), what="").fingerprint

    same = [of(numbered), of(lambda indices, draw: dict(numbered(indices, draw)))]
    other = [
        of(numbered, 31),
        of(lambda indices, draw: {"z": numbered(indices, draw)["x"]}),
        of(lambda indices, draw: {"x": numbered(indices, draw)["x"].astype(np.float64), "y": numbered(indices, draw)["y"]}),
        of(lambda indices, draw: {**numbered(indices, draw), "y": torch.from_numpy(indices * 2.0 + (indices == 29))}),
    ]
    assert same[0] == same[1]
    assert len({same[0], *other}) == 5


WRONG: dict[str, tuple[Any, str]] = {
    "a tuple": (lambda at, draw: (at, at), "fetch of the training samples returned a tuple of 2, but must return a dict"),
    "words": (lambda at, draw: {"y": np.array(["a", "b"])}, r"returned a ndarray \[2\] of <U1 as field 'y'"),
    "no batch": (lambda at, draw: {"y": torch.zeros(7)}, r"a Tensor \[7\] of float32 as field 'y', .* with 2 as the first"),
    "ours": (lambda at, draw: {"samples": torch.zeros(2)}, "the fields samples, but must .* other than samples and numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_fetch_returns_is_looked_at(case: str) -> None:
    fetch, text = WRONG[case]
    with pytest.raises(DataError, match=text):
        OwnSamples(Own(fetch), what="the training samples").fetch(np.arange(2), None)


def test_samples_that_are_none_are_told() -> None:
    with pytest.raises(DataError, match=r"the test samples are a list of 2: samples\(split\) must return Samples.of"):
        OwnSamples([1, 2], what="the test samples")
    with pytest.raises(DataError, match="the test samples are empty: their length is 0"):
        OwnSamples(Samples.of({"x": np.zeros((0, 2))}), what="the test samples")
    with pytest.raises(DataError, match=r"facts of the test samples are .*they are written to model\.json"):
        OwnSamples(Samples.of({"x": np.zeros(2)}, facts={"mean": np.float32(1)}), what="the test samples")


RNG = np.random.default_rng(0)
UNSTEADY: dict[str, tuple[Any, str]] = {
    "a generator": (
        lambda: Own(lambda at, draw: {"x": at * 1.0, "y": RNG.random(len(at))}),
        "field 'y' of sample 0 of the training samples differs when the same samples are fetched again, with the same random "
        r"numbers. fetch must depend only on its arguments, .*as in rng.uniform\('flip'\) \[B\]",
    ),
    "the batch": (lambda: Own(lambda at, draw: {"x": at - at.mean()}), "sample 0 of the .* differs when it is fetched alone"),
}


@pytest.mark.parametrize("case", UNSTEADY)
def test_samples_that_differ_each_time_are_refused_at_the_start(case: str) -> None:
    make, text = UNSTEADY[case]
    with pytest.raises(DataError, match=text):
        check_repeatable(OwnSamples(make(), what="the training samples"), is_random=True)


def padded(indices: np.ndarray, draw: HostDraws | None) -> dict[str, Any]:
    longest = int(indices.max()) + 1
    return {"x": np.where(np.arange(longest) <= indices[:, None], 7, 0), "y": np.where(indices % 2, np.nan, 1.0)}


@pytest.mark.parametrize("fetch", [numbered, padded])
@pytest.mark.parametrize("is_random", [True, False])
def test_samples_that_keep_the_rule_pass(fetch: Any, is_random: bool) -> None:
    check_repeatable(OwnSamples(Own(fetch), what=""), is_random=is_random)
