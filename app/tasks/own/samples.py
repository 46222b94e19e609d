"""A user's samples with what they may leave out, and checks of what they return."""

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
from app.data.samples import Layout, LooksUp
from app.errors import DataError
from app.tasks.own.given import kind

_OURS = ("samples", "numbers")
"""Fields that the application adds to every batch."""
_LOOKED_AT = 64
"""Samples that enter a fingerprint."""


def completed(given: Any, *, what: str) -> CompleteSamples:
    """Return a user's samples in the full form. `what` names them ("the training samples"). Raises DataError."""
    if isinstance(given, CompleteSamples):
        return given
    return (LookedUpSamples if isinstance(given, LooksUp) else CompleteSamples)(given, what=what)


class CompleteSamples:
    """A user's samples in the full form of `app.data.samples.Samples`. What else they have is there as well."""

    def __init__(self, given: Any, *, what: str) -> None:
        missing = [name for name in ("__len__", "fetch") if not hasattr(given, name)]
        if missing:
            raise DataError(
                f"{what} are a {type(given).__name__}, which has no {missing[0]}: samples(split) must return "
                "Samples.of(...), or an object with __len__(self) and fetch(self, indices, draw)"
            )
        self.given, self.what = given, what
        self._names: tuple[str, ...] = ()
        if len(given) < 1:
            raise DataError(f"{what} are empty: their length is 0")
        self.facts: Mapping[str, Any] = getattr(given, "facts", {})
        try:
            json.dumps(self.facts)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the facts of {what} are {self.facts!r}: they are written to model.json, so they may only "
                f"contain texts, numbers, and lists and dicts of these ({error})"
            ) from None
        self.workers = bool(getattr(given, "workers", False))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    def __len__(self) -> int:
        return len(self.given)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The samples' own; else a hash of their number and of some of them, as an evaluation sees them."""
        own = getattr(self.given, "fingerprint", None)
        if own is not None:
            return str(own)
        digest = hashlib.sha256(str(len(self)).encode())
        for index in evenly(len(self), _LOOKED_AT):
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


class LookedUpSamples(CompleteSamples):
    """Such samples that are arrays: batches are written where their memory is."""

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of each field."""
        return self.given.layout  # type: ignore[no-any-return]

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write the batch into the fields' memory, each [B, ...]."""
        self.given.fetch_into(indices, memory)


def evenly(size: int, most: int) -> list[int]:
    """Return at most so many indices of 0 .. size - 1, evenly spaced, from the first to the last."""
    return sorted({int(at) for at in np.linspace(0, size - 1, min(size, most)).round()})


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]."""
    return tensor.contiguous().flatten().view(torch.uint8)
