"""What the data loader needs from a split: whole batches by index, with randomness that depends on the sample number alone.

Nothing here knows what a sample is. A task says what its splits are beyond this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, _ProtocolMeta, runtime_checkable

import numpy as np
from torch import Tensor

from app.data import wrapped
from app.data.draws import HostDraws

Batch = dict[str, Any]
"""Tensors [B, ...] by name: what the samples have, and `samples`, their numbers, int64 [B], -1 for padding. An array,
`numbers`, has these on the host as well."""
CHECK = "`samerun data check` lists all samples that cannot be read"
"""Added to errors about an unreadable sample."""
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and type of each field of a batch."""


class _Makes(_ProtocolMeta):
    """Has `Samples.of`, which what keeps to the protocol need not have."""

    def of(
        cls,  # noqa: N805  (of a metaclass)
        dataset: Any,
        *,
        names: Sequence[str | None] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the samples of a data set that already exists.

            Samples.of({"x": x, "y": y})                  # arrays or tensors [N, ...]: looked up, the fastest
            Samples.of(dataset, names=("x", "y"))         # a Dataset of torch with items (x, y)
            Samples.of(dataset)                           # items are dicts, or it is one of the `datasets` library

        A Dataset may draw from the generators of `random`, `numpy.random` and `torch`, as random transforms do: they are seeded
        for each sample, and in an evaluation so that it is the same each time. Generators of its own it must not keep.

        Args:
            dataset: Has __len__ and __getitem__. A stream (IterableDataset) is refused: its order is no function of the step.
            names: Of the parts of an item, in their order, and None for a part that is left out; of items that are dicts, those
                that are kept (default: all).
            collate: Makes a batch of a list of items: a dict of tensors [B, ...], or a tuple of such, with `names`. Default:
                torch's default_collate for each field.
            facts: What the model must know of the samples, as JSON holds it; `model(facts)` is given it.

        Raises DataError for what cannot be samples.
        """
        return wrapped.wrapped(dataset, names=names, collate=collate, facts=facts or {})


class Samples(Protocol, metaclass=_Makes):
    """One split of a data set, opened and checked. It may be pickled, or forked into the workers of a DataLoader.

    It neither shuffles nor knows of processes. Samples of an own task need `__len__` and `fetch` alone: `facts` are then {},
    `workers` False, and `fingerprint` is made of some of the samples. Optional for all: `remedy`, a text that says what else
    helps where training waits for these samples ("make the pictures smaller"), and `count(indices)`, see `app.task.Task`.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a model must know of the samples, as JSON holds it: {"classes": 10}."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data on every machine, and another for other data."""

    @property
    def workers(self) -> bool:
        """Whether `fetch` makes samples one by one, so that worker processes help; False for a look-up."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, each [B, ...]. What is returned depends on the arguments alone.

        `indices` are int64 [B], in 0 .. len - 1. `draw` gives random numbers for these samples; None: nothing is random, as in
        an evaluation. Raises DataError if a sample cannot be read; the text names the file, or the split and the index.
        """


@runtime_checkable
class LooksUp(Protocol):
    """What `Samples` that are arrays have besides: batches are written where their memory is, a device's for instance."""

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of each field."""

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write what `fetch` returns for int64 [B] into the field's arrays, each [B, ...]."""


class Splits(NamedTuple):
    """The splits of a task's data, opened: each `Samples`."""

    train: Any
    """None: there is none, and nothing is trained."""
    validation: Any | None
    """What a run looks at before its end. None: nothing is looked at."""
    test: Any | None
    """What the final weights are scored on, once. None: there is no such score."""
    others: Mapping[str, str] = {}
    """What else the task reads that decides what is learnt: a digest of each, by name."""

    @property
    def scored(self) -> dict[str, Any]:
        """The splits that weights are scored on, by name: those that there are."""
        both = {"validation": self.validation, "test": self.test}
        return {name: samples for name, samples in both.items() if samples is not None}

    @property
    def facts(self) -> dict[str, str]:
        """What tells these data from any other, by name."""
        named = {"training": self.train, **self.scored}
        found = {f"{name} data": f"{len(samples)} samples, {samples.fingerprint}" for name, samples in named.items()}
        return {**found, **self.others}
