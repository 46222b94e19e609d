"""What the feed asks of a split of any data: whole batches by index, random by sample number alone.

Nothing here knows what a sample is. A task says what its splits are beyond this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from app.data.draws import HostDraws

Batch = dict[str, Any]
"""Tensors [B, ...] by name: what the samples have, and `samples`, their numbers, int64 [B], -1 for padding. An array,
`numbers`, has these on the host as well."""
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and type of each field of a batch."""


class Samples(Protocol):
    """One split of a data set, opened and checked. It may be pickled, or forked into the workers of a DataLoader.

    It neither shuffles nor knows of processes. Optional: `remedy`, a text that says what else helps where training waits for
    these samples ("make the pictures smaller").
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a model must know of the samples, as JSON holds it."""

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

        Args:
            indices: int64 [B], in 0 .. len - 1.
            draw: Random numbers for these B samples; None: nothing is random, as in an evaluation.

        Raises:
            DataError: A sample cannot be read; the text names the file, or the split and the index.
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
    validation: Any | None
    """What a run looks at before its end. None: nothing is looked at."""
    test: Any | None
    """What the final weights are scored on, once. None: there is no such score."""

    @property
    def scored(self) -> dict[str, Any]:
        """The splits that weights are scored on, by name: those that there are."""
        both = {"validation": self.validation, "test": self.test}
        return {name: samples for name, samples in both.items() if samples is not None}

    @property
    def facts(self) -> dict[str, str]:
        """What tells these data from any other, by name."""
        named = {"training": self.train, **self.scored}
        return {f"{name} data": f"{len(samples)} samples, {samples.fingerprint}" for name, samples in named.items()}
