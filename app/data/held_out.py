"""Divides a split in two: samples held out for validation, and the rest for training.

Which they are is a function of the size and a seed alone, computed where it is needed without a table: the same on any
topology, and memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from app.data.draws import HostDraws
from app.data.order import permute
from app.data.samples import Layout, LooksUp, Samples, Splits
from app.errors import DataError, RecipeError


@dataclass(frozen=True)
class Part:
    """The samples at `start` .. `stop` - 1 of a random order of `whole`."""

    whole: Any
    seed: int
    start: int
    stop: int

    @property
    def fingerprint(self) -> str:
        """The same for the same samples of the same data."""
        told = [self.whole.fingerprint, len(self.whole), self.seed, self.start, self.stop]
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def __len__(self) -> int:
        return self.stop - self.start

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, as `Samples.fetch` says."""
        fields: dict[str, Tensor] = self.whole.fetch(self.places(indices), draw)
        return fields

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Return where in `whole` the samples at `indices`, int64 [B], are."""
        return permute(indices + self.start, size=len(self.whole), seed=self.seed, epoch=0, purpose="validation")

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a model must know of the samples, as `Samples.facts`."""
        found: Mapping[str, Any] = self.whole.facts
        return found

    @property
    def workers(self) -> bool:
        """Return True if worker processes help, as `Samples.workers`."""
        return bool(self.whole.workers)

    @property
    def remedy(self) -> str:
        """What else helps where training waits for these samples; empty if `whole` has no such text."""
        return str(getattr(self.whole, "remedy", ""))

    @property
    def count(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Returns the counts of samples by their indices, as `app.task.Task` describes; None if `whole` has none."""
        found = getattr(self.whole, "count", None)
        return None if found is None else lambda indices: found(self.places(indices))


class PartLookedUp(Part):
    """A part of samples that are arrays."""

    @property
    def layout(self) -> Layout:
        """Shape and type of each field, as `LooksUp` says."""
        found: Layout = self.whole.layout
        return found

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write what `fetch` returns, as `LooksUp` says."""
        self.whole.fetch_into(self.places(indices), memory)


def held_out(data: Splits, fraction: float | None, *, seed: int) -> Splits:
    """Return the splits, with so large a share of the training samples as validation split; None, or without any: as they are.

    Raises RecipeError if there is a validation split already, and DataError if the share or the rest is no sample.
    """
    if fraction is None or data.train is None:
        return data
    if data.validation is not None:
        raise RecipeError(
            f"train.validation_fraction is {fraction:g}, but the data has its own validation split: remove it "
            "(train.validation_fraction=null)"
        )
    size = len(data.train)
    count = round(fraction * size)
    if not 0 < count < size:
        raise DataError(
            f"train.validation_fraction is {fraction:g}, which is {count} of {size} training samples: both "
            "splits need at least one"
        )
    return data._replace(validation=_part(data.train, seed, 0, count), train=_part(data.train, seed, count, size))


def first_of(samples: Samples, most: int | None, *, seed: int) -> Any:
    """Return at most so many samples, always the same of a random order; None: all."""
    if most is None or most >= len(samples):
        return samples
    if isinstance(samples, Part):  # in random order already
        return replace(samples, stop=samples.start + most)
    return _part(samples, seed, 0, most)


def as_opened(data: Splits) -> Splits:
    """Return the splits as the task gave them, before samples were held out."""
    if not isinstance(data.train, Part):
        return data
    return data._replace(train=data.train.whole, validation=None)


def mapped(samples: Any, change: Callable[[Any], Any]) -> Any:
    """Return the samples with what the task opened changed; of a part the same part."""
    return replace(samples, whole=change(samples.whole)) if isinstance(samples, Part) else change(samples)


def _part(samples: Samples, seed: int, start: int, stop: int) -> Part:
    return (PartLookedUp if isinstance(samples, LooksUp) else Part)(samples, seed, start, stop)
