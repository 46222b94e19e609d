"""Samples.of: data sets and arrays of others as samples that are the same wherever they are made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from app.data import loader
from app.data.draws import HostDraws
from app.data.order import TrainBatches
from app.data.samples import Samples
from app.errors import DataError

NAMES = ("x", "y")


class Shaken(Dataset):
    """Items (x, y), where x has random numbers of all three global generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 13:
            torch.randn(7)  # others may draw less
        return torch.cat([torch.tensor([index, random.random(), np.random.rand()]), torch.rand(2)]), index % 3  # noqa: NPY002


def of_training(samples: Any, workers: int) -> list[dict[str, Any]]:
    batches = TrainBatches(size=40, seed=5, global_batch_size=8, micro_batches_per_step=2, first_step=0, last_step=8)
    made = loader.build_loader(samples, batches, seed=5, workers=workers)
    return list(loader.batches_of(made))


def test_random_transforms_are_the_same_on_any_number_of_workers() -> None:
    ours, theirs = (of_training(Samples.of(Shaken(), names=NAMES), workers) for workers in (0, 2))
    assert len(ours) == 16
    for here, there in zip(ours, theirs, strict=True):
        assert all(torch.equal(here[name], there[name]) for name in ("samples", *NAMES))
    of_sample = {}
    for batch in ours:  # of two epochs: 5 steps each
        of_sample |= {int(number): x for number, x in zip(batch["samples"], batch["x"], strict=True)}
    again = next(number for number in of_sample if number + 40 in of_sample)
    assert of_sample[again][0] == of_sample[again + 40][0]
    assert (of_sample[again][1:] != of_sample[again + 40][1:]).all()


def test_an_evaluation_is_the_same_each_time_and_generators_are_left_as_they_were() -> None:
    samples = Samples.of(Shaken(), names=NAMES)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    first = samples.fetch(np.arange(4), None)["x"]
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    assert torch.equal(samples.fetch(np.arange(4)[::-1].copy(), None)["x"].flip(0), first)
    assert not torch.equal(samples.fetch(np.arange(4), HostDraws(0, np.arange(4) + 40))["x"], first)


def test_arrays_are_looked_up() -> None:
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), torch.arange(20)
    for samples in (Samples.of({"x": x, "y": y}), Samples.of(TensorDataset(torch.from_numpy(x), y), names=NAMES)):
        assert (len(samples), samples.workers, samples.is_array) == (20, False, True)
        fetched = samples.fetch(np.array([19, 0, 0]), None)
        assert torch.equal(fetched["x"], torch.from_numpy(x)[[19, 0, 0]])
        assert torch.equal(fetched["y"], y[[19, 0, 0]])


def test_items_may_be_dicts_and_parts_may_be_left_out() -> None:
    dicts = [{"x": np.float32([1, 2]), "y": 3, "name": "a"}, {"x": np.float32([4, 5]), "y": 6, "name": "b"}]
    tuples = [tuple(item.values()) for item in dicts]
    for samples in (Samples.of(dicts, names=NAMES), Samples.of(tuples, names=(*NAMES, None), facts={"classes": 2})):
        assert {name: field.tolist() for name, field in samples.fetch(np.array([1, 0]), None).items()} == {
            "x": [[4, 5], [1, 2]],
            "y": [6, 3],
        }
    assert samples.facts == {"classes": 2}


def test_collate_pads() -> None:
    def padded(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        texts, labels = zip(*items, strict=True)
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)

    texts = [(torch.ones(1 + at, dtype=torch.int64), at) for at in range(5)]
    fetched = Samples.of(texts, names=NAMES, collate=padded).fetch(np.array([0, 3]), None)
    assert fetched["x"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    with pytest.raises(DataError, match=r"'x' of the samples \[0, 3\] cannot be stacked into a tensor .*, which pads them"):
        Samples.of(texts, names=NAMES).fetch(np.array([0, 3]), None)


def test_data_sets_of_the_hub_library_give_tensors() -> None:
    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [0, 1, 2]})
    fetched = Samples.of(table).fetch(np.array([2, 0]), None)
    assert (fetched["x"].tolist(), fetched["y"].tolist()) == ([[5, 6], [1, 2]], [2, 0])

    def shaken(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"x": [torch.tensor(x) + random.random() for x in rows["x"]]}

    samples, indices = Samples.of(table.with_transform(shaken)), np.array([2, 0])
    draws = HostDraws(0, indices)
    assert torch.equal(samples.fetch(indices, draws)["x"][1], samples.fetch(indices[1:], HostDraws(0, indices[1:]))["x"][0])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Broken(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int]:
        raise ValueError(f"no {index}")


PAIRS = [(torch.zeros(3, 4), 1)] * 3
REFUSED = {
    "a stream": (lambda: Samples.of(Stream()), "of Stream, which gives no samples by number. The samples of a step"),
    "no names": (
        lambda: Samples.of(PAIRS),
        r"an item of the data set has 2 parts, and names=\(\) has 0: give Samples.of\(..., names=...\) a name for each part",
    ),
    "another name": (lambda: Samples.of([{"x": 1}], names=("z",)), "has no field 'z': it has x"),
    "words": (lambda: Samples.of([("cat", 1)], names=NAMES), r"field 'x' .* cannot be stacked .* str becomes a list"),
    "an error": (
        lambda: Samples.of(Broken(), names=NAMES),
        r"sample 0 of Broken cannot be loaded: ValueError: no 0 \(.*wrapped.py:\d+",
    ),
    "other lengths": (
        lambda: Samples.of({"x": np.zeros(3), "y": np.zeros(2)}),
        "the same length, .* have: {'x': 3, 'y': 2}",
    ),
    "splits": (lambda: Samples.of({"train": PAIRS}), "expects arrays or tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_samples_is_told(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(DataError, match=text):
        make().fetch(np.array([0]), None)
