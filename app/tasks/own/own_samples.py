"""A user's samples as the application takes them: with what they may leave out, and what they return checked.

The same arguments must give the same samples, whatever else is in the batch. A few are tried at the start of a run: this finds
what depends on a generator of its own, on a counter or on the batch. It is no proof that there is nothing of the kind.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.draws import HostDraws
from app.data.samples import DatasetSamples, Layout, LooksUp
from app.errors import DataError
from app.task import own_part

_OURS = ("samples", "numbers")
"""Fields that the application adds to every batch."""
_IN_FINGERPRINT, _TRIED = 64, 8
"""Samples that enter a fingerprint, and that are fetched several times at the start."""
_ROUNDING = 1e-4
"""Largest change by rounding when samples are computed in batches of other sizes, as a share of a sample's largest number."""
_RULE = "fetch must depend only on its arguments, or the run changes with the number of processes and after a resume"
_OF_FETCH = (
    f"{_RULE}: it may use no random generator, state or clock, and nothing from other samples of the batch. "
    "Take random numbers from its second argument, as in rng.uniform('flip') [B], or wrap a Dataset in Samples.of(...), "
    "which seeds Python's, NumPy's and torch's global generators for each sample"
)
_OF_DATASET = (
    f"{_RULE}. Python's, NumPy's and torch's global generators are seeded for each sample, so the data set "
    "has its own generator (made by numpy.random.default_rng() or torch.Generator(), or kept by "
    "albumentations), or it counts, reads the clock, or keeps earlier results. Make such a generator in "
    "__getitem__, seeded with torch.initial_seed()"
)


def checked(given: Any, *, what: str) -> OwnSamples:
    """Return a user's samples in the full form. `what` names them ("the training samples"). Raises DataError."""
    return (OwnArrays if isinstance(given, LooksUp) else OwnSamples)(given, what=what)


class OwnSamples:
    """A user's samples, which fill in `app.data.samples.Samples` and check what `fetch` returns."""

    def __init__(self, given: Any, *, what: str) -> None:
        missing = [name for name in ("__len__", "fetch") if not callable(getattr(given, name, None))]
        if missing:
            raise DataError(
                f"{what} are a {type(given).__name__}, which has no {missing[0]}: samples(split) must return "
                "Samples.of(...), or an object with __len__(self) and fetch(self, indices, rng)"
            )
        self.given, self.what = given, what
        self._names: tuple[str, ...] = ()
        if len(given) < 1:
            raise DataError(f"{what} are empty: their length is 0")
        self.facts: Mapping[str, Any] = own_part(given, "facts", {})
        try:
            json.dumps(self.facts)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the facts of {what} are {self.facts!r}: they are written to model.json, so they may only "
                f"contain texts, numbers, and lists and dicts of these ({error})"
            ) from None
        self.workers = bool(own_part(given, "workers", False))
        self.remedy = str(own_part(given, "remedy", ""))
        if (count := own_part(given, "count")) is not None:
            self.count = count

    def __len__(self) -> int:
        return len(self.given)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The samples' own; else a hash of their number and of some of them, as an evaluation sees them."""
        said = own_part(self.given, "fingerprint")
        if said is not None:
            return str(said)
        digest = hashlib.sha256(str(len(self)).encode())
        for index in evenly(len(self), _IN_FINGERPRINT):
            for name, field in self.fetch(np.array([index]), None).items():
                digest.update(f"{name} {field.dtype} {list(field.shape)}".encode())
                digest.update(bits_of(field).numpy().tobytes())
        return digest.hexdigest()[:16]

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return the fields of a batch, each [B, ...]. Raises DataError for what is not that."""
        fetched = self.given.fetch(indices, draw)
        if not isinstance(fetched, Mapping) or not fetched:
            raise DataError(
                f"fetch of {self.what} returned {kind(fetched)}, but must return a dict of tensors [B, ...] by field name"
            )
        fields = {name: self._field(name, value, len(indices)) for name, value in fetched.items()}
        self._names = self._names or tuple(fields)
        if fields.keys() != set(self._names):
            raise DataError(
                f"fetch of {self.what} returned the fields {', '.join(fields)}, and earlier "
                f"{', '.join(self._names)}: each batch must have the same fields"
            )
        return fields

    def _field(self, name: Any, value: Any, size: int) -> Tensor:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.ndim:
            value = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(name, str) or name in _OURS:
            raise DataError(
                f"fetch of {self.what} returned a field {name!r}: rename it, because the application uses {' and '.join(_OURS)}"
            )
        if not isinstance(value, Tensor):
            raise DataError(
                f"fetch of {self.what} returned {kind(value)} as field {name!r}, but must return a tensor, or "
                f"an array of numbers, with {size} as the first dimension, one row per index"
            )
        if value.ndim == 0 or len(value) != size:
            raise DataError(
                f"fetch of {self.what} returned field {name!r} as {kind(value)} for {size} indices: its first "
                f"dimension must be {size}, one row per sample"
            )
        if not value.is_cpu:
            raise DataError(
                f"fetch of {self.what} returned field {name!r} on {value.device}: it must be on the CPU, "
                "because the application copies batches to the device"
            )
        return value.detach()


class OwnArrays(OwnSamples):
    """Samples that are arrays: batches are written where their memory is."""

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of each field."""
        return self.given.layout  # type: ignore[no-any-return]

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write the batch into the fields' memory, each [B, ...]."""
        self.given.fetch_into(indices, memory)


def check_repeatable(samples: OwnSamples, *, is_random: bool) -> None:
    """Fetch a few samples again, in another order, and one by one. Raises DataError, which names the field that differs.

    `is_random`: as in training, with random numbers; else as in an evaluation. Where batches are padded to their longest
    sample, what two of them share is compared.
    """
    indices = np.array(evenly(len(samples), _TRIED))

    def fetch(wanted: np.ndarray) -> dict[str, Tensor]:
        numbers = wanted + len(samples)  # of the second epoch: they are no indices
        return samples.fetch(wanted, HostDraws(0, numbers) if is_random else None)

    def compare(rows: slice, other: dict[str, Tensor], how: str, *, rounding: float = _ROUNDING) -> None:
        for name in first:
            for index, left, right in zip(indices[rows], first[name][rows], other[name], strict=True):
                if not are_same(left, right, rounding):
                    hint = _OF_DATASET if isinstance(samples.given, DatasetSamples) else _OF_FETCH
                    raise DataError(f"field {name!r} of sample {index} of {samples.what} differs when {how}. {hint}")

    arguments = "the same samples with the same draws" if is_random else "the same samples"
    first, everything = fetch(indices), slice(None)
    compare(everything, fetch(indices), f"{arguments} are fetched again", rounding=0.0)
    turned = {name: field.flip(0) for name, field in fetch(indices[::-1].copy()).items()}
    compare(everything, turned, f"{arguments} are fetched in another order")
    for at in range(len(indices)):
        compare(slice(at, at + 1), fetch(indices[at : at + 1]), "it is fetched alone, with the same draw")


def are_same(left: Tensor, right: Tensor, rounding: float) -> bool:
    """Return True if two tensors are equal where both have elements, up to this share of the largest; 0: in all bits."""
    if left.dtype != right.dtype or left.ndim != right.ndim:
        return False
    if rounding == 0.0:
        return left.shape == right.shape and bool((bits_of(left) == bits_of(right)).all())
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


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]."""
    return tensor.contiguous().flatten().view(torch.uint8)


def kind(value: Any) -> str:
    """Return what a value is, for a message: `a Tensor [3, 4] of float32`."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
