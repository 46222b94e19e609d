"""A user's samples as the application takes them: with defaults for what they leave out, and what they return checked.

The same arguments must give the same samples, whatever else is in the batch. A few are tried at the start of a run: this finds
what depends on a generator of its own, on a counter or on the batch. It does not prove that there is nothing of the kind.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.draws import HostDraws
from app.environment.topology import listed
from app.errors import DataError, noted
from app.task import own_part

_OURS = ("samples", "numbers")
"""Fields that the application adds to every batch."""
_IN_FINGERPRINT, _TRIED = 64, 8
"""Samples that enter a fingerprint, and that are fetched several times at the start."""
_ROUNDING = 1e-4
"""Largest change by rounding when samples are computed in batches of other sizes, as a share of a sample's largest number."""
_RULE = (
    "fetch must depend only on its arguments, or the run changes with the number of processes and after a resume: it may use "
    "no generator of its own, state or clock, and nothing from other samples of the batch. Take random numbers from its second "
    "argument, as in rng.uniform('flip') [B]. For a Dataset in Samples.of(...) Python's, NumPy's and torch's global generators "
    "are seeded for each sample; a generator of its own must be made in __getitem__, seeded with torch.initial_seed()"
)


class OwnSamples:
    """A user's samples, with all of `app.data.samples.Samples`. Checks what `fetch` returns."""

    def __init__(self, given: Any, *, what: str) -> None:
        """`what` names them ("the training samples"). Raises DataError."""
        if not hasattr(given, "__len__") or not hasattr(given, "fetch"):
            raise DataError(
                f"{what} are {described(given)}: samples(split) must return Samples.of(...), or an object with "
                "__len__(self) and fetch(self, indices, rng)"
            )
        if len(given) < 1:
            raise DataError(f"{what} are empty: their length is 0")
        self.given, self.what = given, what
        self.facts: Mapping[str, Any] = own_part(given, "facts", {})
        try:
            json.dumps(self.facts)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the facts of {what} are {self.facts!r}: they are written to model.json, so they may only "
                f"contain texts, numbers, and lists and dicts of these ({error})"
            ) from None
        self.workers = bool(own_part(given, "workers", False))
        self.is_array = bool(own_part(given, "is_array", False))
        if (count := own_part(given, "count")) is not None:
            self.count = count

    def __len__(self) -> int:
        return len(self.given)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The samples' own; else a hash of their number and of some of them, as in an evaluation."""
        own = own_part(self.given, "fingerprint")
        if own is not None:
            return str(own)
        digest = hashlib.sha256(str(len(self)).encode())
        for index in evenly(len(self), _IN_FINGERPRINT):
            for name, field in self.fetch(np.array([index]), None).items():
                digest.update(f"{name} {field.dtype} {list(field.shape)}".encode())
                digest.update(_bits(field).numpy().tobytes())
        return digest.hexdigest()[:16]

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, each [B, ...]. Raises DataError for what is not that."""
        with noted(lambda _: f"fetch of {self.what} failed on the samples {listed(indices.tolist(), 8)}"):
            fetched = self.given.fetch(indices, draw)
        if not isinstance(fetched, Mapping) or not fetched.keys().isdisjoint(_OURS):
            found = f"the fields {', '.join(map(str, fetched))}" if isinstance(fetched, Mapping) else described(fetched)
            raise DataError(
                f"fetch of {self.what} returned {found}, but must return a dict of tensors [B, ...] by field name, other than "
                f"{' and '.join(_OURS)}, which the application adds"
            )
        return {name: self._field(name, value, len(indices)) for name, value in fetched.items()}

    def _field(self, name: str, value: Any, size: int) -> Tensor:
        found = value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
            found = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != size or not found.is_cpu:
            raise DataError(
                f"fetch of {self.what} returned {described(value)} as field {name!r}, but must return a tensor on the CPU, or "
                f"an array of numbers, with {size} as the first dimension, one row per index"
            )
        return found.detach()


def check_repeatable(samples: OwnSamples, *, is_random: bool) -> None:
    """Fetch a few samples again, and one by one. Raises DataError, which names the field that differs.

    `is_random`: as in training, with random numbers; else as in an evaluation. Where batches are padded to their longest
    sample, what two of them share is compared.
    """
    indices = np.array(evenly(len(samples), _TRIED))

    def fetch(wanted: np.ndarray) -> dict[str, Tensor]:
        numbers = wanted + len(samples)  # of the second epoch: they are no indices
        return samples.fetch(wanted, HostDraws(0, numbers) if is_random else None)

    first, places = fetch(indices), np.arange(len(indices))
    trials = [(places, "the same samples are fetched again", 0.0)]
    trials += [(places[at : at + 1], "it is fetched alone", _ROUNDING) for at in places]
    draws = ", with the same random numbers" if is_random else ""
    for wanted, how, rounding in trials:
        if found := first_difference(first, fetch(indices[wanted]), wanted, rounding):
            name, place = found
            raise DataError(f"field {name!r} of sample {indices[place]} of {samples.what} differs when {how}{draws}. {_RULE}")


def first_difference(
    batch: Mapping[str, Any], other: Mapping[str, Any], rows: Iterable[int], rounding: float
) -> tuple[str, int] | None:
    """Return field and row of a sample in `batch` that is not the same in `other`, which has the samples of these rows.

    Fields of `other` that are no tensors with a row for each sample are skipped.
    """
    rows = list(rows)
    for name, value in batch.items():
        theirs = other.get(name)
        if isinstance(theirs, Tensor) and theirs.shape[:1] == (len(rows),):
            for row, one in zip(rows, theirs, strict=True):
                if not are_same(value[row].detach(), one.detach(), rounding):
                    return name, row
    return None


def are_same(left: Tensor, right: Tensor, rounding: float) -> bool:
    """Return True if two tensors are equal where both have elements, up to this share of the largest; 0: in all bits."""
    if left.dtype != right.dtype or left.ndim != right.ndim:
        return False
    if rounding == 0.0:
        return left.shape == right.shape and bool((_bits(left) == _bits(right)).all())
    shared = tuple(slice(min(sizes)) for sizes in zip(left.shape, right.shape, strict=True))
    left, right = left[shared], right[shared]
    if not (left.is_floating_point() or left.is_complex()):
        return bool((left == right).all())
    wide = left.double() if left.is_floating_point() else left.abs().double()
    largest = float(wide.nan_to_num(0.0, 0.0, 0.0).abs().max()) if wide.numel() else 0.0
    return left.isclose(right, rtol=rounding, atol=rounding * largest, equal_nan=True).all().item() is True


def evenly(size: int, most: int) -> list[int]:
    """Return at most `most` indices of 0 .. size - 1, evenly spaced, from the first to the last."""
    return sorted({int(at) for at in np.linspace(0, size - 1, min(size, most)).round()})


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]."""
    return tensor.contiguous().flatten().view(torch.uint8)


def shapes(batch: Mapping[str, Any]) -> str:
    """Return the tensors of a batch, for a message: `x float32 [8, 2], y int64 [8]`."""
    tensors = {name: it for name, it in batch.items() if isinstance(it, Tensor) and name not in _OURS}
    return ", ".join(f"{name} {str(it.dtype).removeprefix('torch.')} {list(it.shape)}" for name, it in tensors.items())


def described(value: Any) -> str:
    """Return what a value is, for a message: `a Tensor [3, 4] of float32`."""
    if isinstance(value, (Tensor, np.ndarray)):
        where = f" on {value.device}" if isinstance(value, Tensor) and not value.is_cpu else ""
        return f"a {type(value).__name__} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}{where}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
