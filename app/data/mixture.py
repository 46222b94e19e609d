"""Mixtures: samples of several sources in given proportions, in an order that is a function of (seed, sample number) alone.

Sample numbers count the samples of the run, from 0. They are divided into windows. In each window a source has exactly its
share, by largest remainders (Hamilton's method), so a weight is off by less than one sample in a window. A keyed permutation
of the window's places decides which source a place has. What a source has had so far is its quota times the windows before,
and a count within the window: nothing grows with the data or the run, and a resumed run computes what it needs at once.

A source is read in passes, each in a random order of its own: sample c of a source is in pass c // len(source). The random
numbers of a sample depend on its number in the run, so each pass has others.

A phase changes the weights from a step on. It begins a new window; the window before it ends early, with the samples that it
had until then. So what was trained before does not depend on later phases, and each source continues where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.data.draws import HostDraws
from app.data.order import permute
from app.errors import DataError
from app.recipe.kinds import weights_problem

WINDOW_SAMPLES = 65_536
"""Default size of a window."""
LARGEST_WINDOW_SAMPLES = 2**20
"""A window of this size takes about 0.1 s to compute, and 10 MB."""


def quotas(weights: Sequence[float], window: int) -> tuple[int, ...]:
    """Return how many of the `window` samples each source has, by largest remainders; of equal ones the first source's counts.

    Weights count as the decimal numbers that they are written as.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight * window / sum(exact) for weight in exact]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source])
    for source in by_remainder[: window - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


@lru_cache(maxsize=4)
def _window(
    seed: int, first: int, quota: tuple[int, ...], before: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each place of the window that begins with sample `first`, and its row there.

    `before` are the samples of each source before the window, and `sizes` all that a source has.
    """
    places, ends = np.arange(sum(quota)), np.cumsum(quota)
    sources = ends.searchsorted(permute(places, size=len(places), seed=seed, epoch=first, purpose="mixture"), side="right")
    rows = np.empty(len(places), np.int64)
    for source, size in enumerate(sizes):
        passes, positions = np.divmod(before[source] + np.arange(quota[source]), size)
        rows[sources == source] = permute(positions, size=size, seed=seed, epoch=passes, purpose=f"source {source}")
    return sources, rows


@dataclass(frozen=True)
class MixtureOrder:
    """The order of a run's samples: which source each has, and which row of the source."""

    seed: int
    window: int
    size: int
    """Samples of the run."""
    sizes: tuple[int, ...]
    """Samples of each source."""
    starts: NDArray[np.int64]
    """First sample of each phase, ascending from 0."""
    quotas: tuple[tuple[int, ...], ...]
    """Samples of each source in a window of each phase."""
    before: NDArray[np.int64]
    """Samples of each source before each phase, [phases, sources]."""

    @classmethod
    def of(
        cls, phases: Mapping[int, Sequence[float]], *, seed: int, window: int, size: int, sizes: tuple[int, ...]
    ) -> MixtureOrder:
        """Return the order for these weights by the first sample of their phase, ascending from 0."""
        starts, by_phase = np.array([*phases]), tuple(quotas(weights, window) for weights in phases.values())
        before = np.zeros((1, len(sizes)), np.int64)
        for start in starts[1:]:
            known = cls(seed, window, size, sizes, starts[: len(before)], by_phase, before)
            before = np.vstack([before, known.counts_before(int(start))])
        return cls(seed, window, size, sizes, starts, by_phase, before)

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each of these samples of the run, int64 [B], and its row there."""
        begins = self.starts[self.starts.searchsorted(numbers, side="right") - 1]
        firsts = begins + (numbers - begins) // self.window * self.window
        sources, rows = np.empty_like(firsts), np.empty_like(firsts)
        for first in np.unique(firsts).tolist():
            chosen = np.flatnonzero(firsts == first)
            _, of_window, rows_of_window = self._window_at(first)
            sources[chosen], rows[chosen] = of_window[numbers[chosen] - first], rows_of_window[numbers[chosen] - first]
        return sources, rows

    def counts_before(self, number: int) -> NDArray[np.int64]:
        """Return how many samples of each source are before this sample of the run, int64 [sources]."""
        begin = int(self.starts[self.starts.searchsorted(number, side="right") - 1])
        first = begin + (number - begin) // self.window * self.window
        before, of_window, _ = self._window_at(first)
        counted: NDArray[np.int64] = before + np.bincount(of_window[: number - first], minlength=len(before))
        return counted

    def _window_at(self, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return how many samples of each source are before the window with this first sample, and the window (`_window`)."""
        phase = int(self.starts.searchsorted(first, side="right")) - 1
        quota = self.quotas[phase]
        before = self.before[phase] + (first - int(self.starts[phase])) // self.window * np.array(quota)
        return before, *_window(self.seed, first, quota, tuple(before.tolist()), self.sizes)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Samples of several sources, all `Samples` with the same fields.

    Without an `order`, as for validation, these are all samples of the sources, one source after the other. With an order they
    are the samples of a run.
    """

    sources: Mapping[str, Any]
    """Samples by the name of their source."""
    weights: Sequence[float]
    """Weight of each source, of any sum."""
    window: int = WINDOW_SAMPLES
    """Samples in which the shares are exact."""
    phases: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Other weights, by the step (from 1) that they begin with."""
    order: MixtureOrder | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.window <= LARGEST_WINDOW_SAMPLES:
            raise DataError(f"a mixture has a window of {self.window} samples: give 1 to {LARGEST_WINDOW_SAMPLES:,}")
        for weights in (self.weights, *self.phases.values()):
            if problem := weights_problem([*self.sources], weights, self.window):
                raise DataError(f"a mixture of {', '.join(self.sources)}: {problem}")
        steps = [*self.phases]
        if steps != sorted(steps) or any(step < 2 for step in steps):
            raise DataError(f"the phases of a mixture begin with the steps {steps}: give ascending steps, 2 or more")

    def ordered(self, *, seed: int, global_batch_size: int, steps: int) -> Mixture:
        """Return the samples of a run of so many steps."""
        firsts = {0: self.weights, **{(step - 1) * global_batch_size: weights for step, weights in self.phases.items()}}
        size, sizes = steps * global_batch_size, tuple(map(len, self.sources.values()))
        return replace(self, order=MixtureOrder.of(firsts, seed=seed, window=self.window, size=size, sizes=sizes))

    def mapped(self, change: Callable[[Any], Any]) -> Mixture:
        """Return the mixture with each source changed."""
        return replace(self, sources={name: change(source) for name, source in self.sources.items()})

    def __str__(self) -> str:
        """`2 sources (web 0.7, code 0.3)`."""
        return f"{len(self.sources)} sources ({self._shares})"

    @property
    def _shares(self) -> str:
        return ", ".join(f"{name} {weight:g}" for name, weight in zip(self.sources, self.weights, strict=True))

    # As `Samples` -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(map(len, self.sources.values())) if self.order is None else self.order.size

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that a model needs, the first source's."""
        facts: Mapping[str, Any] = next(iter(self.sources.values())).facts
        return facts

    @property
    def workers(self) -> bool:
        """True if worker processes help for some of the samples."""
        return any(source.workers for source in self.sources.values())

    @property
    def is_array(self) -> bool:
        """True if all samples are rows of arrays."""
        return all(source.is_array for source in self.sources.values())

    @property
    def fingerprint(self) -> str:
        """The weights, of an ordered mixture, and fingerprints of the sources."""
        return ", ".join(self.digests("").values())

    def digests(self, split: str) -> dict[str, str]:
        """Return what must be the same in a resumed run, by name. Phases are compared by their steps instead."""
        found = {} if self.order is None else {f"{split} mixture": f"{self._shares}, in windows of {self.window:,} samples"}
        sources = {f"{split} data of {name}": f"{len(it)} samples, {it.fingerprint}" for name, it in self.sources.items()}
        return {**found, **sources}

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, as `Samples.fetch` describes. Raises DataError if sources have other fields."""
        sources, rows = self._locate(indices)
        names, places = [*self.sources], []
        parts: list[dict[str, Tensor]] = []
        for number in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == number)
            fields = self.sources[names[number]].fetch(rows[chosen], None if draw is None else draw.at(chosen))
            kinds, others = (
                {name: (str(it.dtype), *it.shape[1:]) for name, it in part.items()}
                for part in (fields, parts[0] if parts else fields)
            )
            if kinds != others:
                raise DataError(
                    f"{names[number]} has the fields {kinds}, and another source of the mixture {others}: all sources need the "
                    "same fields, of one type and shape"
                )
            parts.append(fields)
            places.append(chosen)
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.concatenate(places).argsort())
        return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}

    @property
    def count(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Returns the counts of samples by their indices, as `app.task.Task` describes; None unless all sources have them."""
        known = all(getattr(source, "count", None) is not None for source in self.sources.values())
        return (lambda indices: self._counted(*self._locate(indices))) if known else None

    @property
    def name(self) -> Callable[[int], str]:
        """Returns the name of a sample by its index: its source, and its row there."""
        return lambda index: " ".join(map(str, self.places(np.array([index]))[0]))

    def places(self, indices: np.ndarray) -> list[tuple[str, int]]:
        """Return the source of each sample, and its row there."""
        names, (sources, rows) = [*self.sources], self._locate(indices)
        return [(names[source], row) for source, row in zip(sources.tolist(), rows.tolist(), strict=True)]

    def by_source(self, indices: np.ndarray) -> dict[str, list[float]]:
        """Return what each source adds to each step: the counts of its samples, or else their number.

        `indices`, int64 [steps, B], are the samples of each step.
        """
        sources, rows = self._locate(indices.ravel())
        weights = None if self.count is None else self._counted(sources, rows)
        places = sources + np.arange(len(indices)).repeat(indices.shape[1]) * len(self.sources)
        sums = np.bincount(places, weights, minlength=len(indices) * len(self.sources)).reshape(len(indices), -1)
        found = zip(self.sources, sums.T.tolist(), strict=True)
        return {name: [int(it) if it == int(it) else it for it in of_steps] for name, of_steps in found}

    def _counted(self, sources: np.ndarray, rows: np.ndarray) -> np.ndarray:
        counted = np.empty(len(rows))
        for number, source in enumerate(self.sources.values()):
            counted[sources == number] = source.count(rows[sources == number])
        return counted

    def _locate(self, indices: np.ndarray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, int64 [B], and its row there."""
        if self.order is None:
            ends = np.cumsum([len(source) for source in self.sources.values()])
            sources = ends.searchsorted(indices, side="right")
            return sources, indices - np.concatenate([[0], ends])[sources]
        return self.order.locate(indices)
