"""How the time of a fixed amount of work falls with the number of devices, from the few sizes that were measured.

Four laws compete, all with coefficients that cannot be negative, fitted to relative errors (so that 7 minutes on 64 devices
weigh as much as 6 hours on one). T(n) is the time on n devices; b/n is what they share, the rest is what they do not:

    serial           b/n + a              stays as it is, whatever n (Amdahl); a ring's (n-1)/n cannot be told from it
    waiting          b/n + c log2(n)/n    each doubling slows the work of all by the same: stragglers, the latency of a tree
    tree             b/n + c log2(n)      each doubling adds the same time
    ring             b/n + c (n-1)        each device adds the same time

Few sizes do not tell which of them is right. Each law is fitted without the largest size and has to foretell it: by how much it
misses is its miss, and its weight is 1 / (miss**2 + 0.05**2), since measured times differ by about 5 % anyway. The prediction
is the weighted geometric mean of all laws. What it may be is the range of every law that missed by 25 % at most (of all, where
none did), fitted to all sizes and with any but the smallest left out, or, where sizes were repeated, with any of them longer or
shorter by the 95 % error of its mean.

In simulated sweeps (docs/scaling.md) the range held the truth in 91 to 100 of 100; without tree or without waiting in 71 to 91.
Laws with two such terms at once foretold no better. Pure; NumPy only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_SIZES = 3
"""Different sizes that a fit needs; with fewer, a prediction cannot be checked."""
_NOISE, _PLAUSIBLE_MISS = 0.05, 0.25
_TERMS: Mapping[str, Callable[[Array], Array]] = {
    "1/n": lambda n: 1 / n,
    "1": np.ones_like,
    "log2(n)/n": lambda n: np.log2(n) / n,
    "log2(n)": np.log2,
    "n-1": lambda n: n - 1,
}
# Quantiles 0.975 of the t distribution, for 1 to 10 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z = 1.959964
_LAWS: Mapping[str, tuple[str, ...]] = {
    "serial": ("1/n", "1"),
    "waiting": ("1/n", "log2(n)/n"),
    "tree": ("1/n", "log2(n)"),
    "ring": ("1/n", "n-1"),
}


@dataclass(frozen=True)
class Law:
    """A law with its coefficients."""

    name: str
    coefficients_s: Mapping[str, float]
    """Seconds, by the term that they belong to."""
    miss: float
    """How much longer the largest size was foretold from the others than measured, as a logarithm: about a share."""
    weight: float
    """How much of the prediction is this law's, 0..1."""

    def formula(self) -> str:
        """Return T(n) as it is written, without the terms that are 0."""
        written = {"1/n": "/n", "1": "", "n-1": " (n-1)"}
        parts = [(seconds, written.get(term, f" {term}")) for term, seconds in self.coefficients_s.items() if seconds]
        return " + ".join(f"{seconds:{',.0f' if seconds >= 1000 else '.4g'}}{term}" for seconds, term in parts)

    def seconds(self, devices: Array) -> Array:
        """Return T(n) of `devices` [...], in seconds."""
        return _seconds(self.coefficients_s, devices)


@dataclass(frozen=True)
class Fit:
    """All laws, and what they say together."""

    laws: Sequence[Law]
    _plausible: Sequence[Mapping[str, float]]
    """Coefficients of every fit that the range is made of."""

    def seconds(self, devices: Array) -> Array:
        """Return the predicted T(n) of `devices` [...], in seconds."""
        logs = sum(law.weight * np.log(law.seconds(devices)) for law in self.laws)
        return np.asarray(np.exp(logs), dtype=np.float64)

    def between(self, devices: Array) -> tuple[Array, Array]:
        """Return from what to what T(n) of `devices` [...] may be, in seconds."""
        every = np.stack([self.seconds(devices), *(_seconds(coefficients, devices) for coefficients in self._plausible)])
        return every.min(0), every.max(0)

    def efficiency(self, devices: Array, *, base: int) -> tuple[Array, Array, Array]:
        """Return the efficiency on `devices` [...], compared with `base` devices, and from what to what it may be."""

        def relative(seconds: Callable[[Array], Array]) -> Array:
            return base * seconds(np.array(float(base))) / (devices * seconds(devices))

        fitted = [functools.partial(_seconds, coefficients) for coefficients in self._plausible]
        every = np.stack([relative(self.seconds), *map(relative, fitted)])
        return every[0], every.min(0), every.max(0)


def fit(devices: Sequence[int], seconds: Sequence[float]) -> Fit | None:
    """Fit T(n) to times in seconds (all > 0) of the same work on so many devices each; a size may be there several times.

    Returns None for fewer than LEAST_SIZES different sizes.
    """
    n, times_s = np.array(devices, dtype=np.float64), np.array(seconds, dtype=np.float64)
    sizes = np.unique(n)
    if len(sizes) < LEAST_SIZES:
        return None
    smaller = n < sizes[-1]
    largest_s = float(np.exp(np.log(times_s[~smaller]).mean()))
    misses = {
        name: float(np.log(_seconds(_coefficients(terms, n[smaller], times_s[smaller]), sizes[-1:])[0] / largest_s))
        for name, terms in _LAWS.items()
    }
    weights = {name: 1 / (miss**2 + _NOISE**2) for name, miss in misses.items()}
    total = sum(weights.values())
    plausible = [name for name, miss in misses.items() if abs(miss) <= _PLAUSIBLE_MISS] or list(_LAWS)
    return Fit(
        laws=[
            Law(name, _coefficients(terms, n, times_s), misses[name], weights[name] / total) for name, terms in _LAWS.items()
        ],
        _plausible=[_coefficients(_LAWS[name], *some) for name in plausible for some in _variants(n, times_s, sizes)],
    )


def _variants(n: Array, times_s: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
    """What might as well have been measured, as devices and seconds: without a size, or with one off by its 95 % error."""
    yield n, times_s
    yield from ((n[n != size], times_s[n != size]) for size in sizes[1:])
    groups = [np.log(times_s[n == size]) for size in sizes]
    freedom = len(n) - len(sizes)
    if freedom == 0:
        return
    deviation = math.sqrt(sum(float(np.square(logs - logs.mean()).sum()) for logs in groups) / freedom)
    for size, logs in zip(sizes, groups, strict=True):
        error = t_quantile(freedom) * deviation / math.sqrt(len(logs))
        yield from ((n, np.where(n == size, times_s * math.exp(off), times_s)) for off in (error, -error))


def _seconds(coefficients_s: Mapping[str, float], devices: Array) -> Array:
    parts = [seconds * _TERMS[term](devices) for term, seconds in coefficients_s.items()]
    return np.asarray(sum(parts), dtype=np.float64)


def _coefficients(terms: Sequence[str], devices: Array, seconds: Array) -> dict[str, float]:
    """Those, none negative, with the least squares of relative errors.

    The closest of the plain fits to every subset of the terms that has no negative coefficient: the non-negative least
    squares solution. Subsets by which one device takes no time are left out.
    """
    rows = np.stack([_TERMS[term](devices) / seconds for term in terms], axis=1)
    found: list[tuple[float, dict[str, float]]] = []
    for number in range(1, len(terms) + 1):
        for subset in itertools.combinations(range(len(terms)), number):
            if not {"1/n", "1"} & {terms[place] for place in subset}:
                continue
            values = np.linalg.lstsq(rows[:, subset], np.ones(len(rows)), rcond=None)[0]
            if (values >= 0).all():
                error = float(np.square(rows[:, subset] @ values - 1).sum())
                coefficients_s = {terms[place]: float(value) for place, value in zip(subset, values, strict=True)}
                found.append((error, dict.fromkeys(terms, 0.0) | coefficients_s))
    return min(found, key=lambda pair: pair[0])[1]  # that of 1/n alone is positive, so there is one


def t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of the t distribution: above 10 degrees of freedom by Cornish and Fisher's expansion."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
