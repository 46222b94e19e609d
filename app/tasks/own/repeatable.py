"""What samples promise, tried at the start of a run: the same arguments, the same samples, whatever else is in the batch.

It finds what depends on a generator of its own, on a counter or on the batch. It is no proof that there is nothing of the kind.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from app.data.draws import HostDraws
from app.data.wrapped import OfDataset
from app.errors import DataError
from app.tasks.own.samples import CompleteSamples, bits_of, evenly

_FEW = 8
_ROUNDING = 1e-4
"""Largest change by rounding when samples are computed in batches of other sizes, as a share of a sample's largest number."""
_RULE = "fetch must depend only on its arguments, or the run changes with the number of processes and after a resume"
_OF_FETCH = (
    f"{_RULE}: it may use no random generator, state or clock, and nothing from other samples of the batch. "
    "Take random numbers from `draw`, as in draw.uniform('flip') [B], or wrap a Dataset in Samples.of(...), "
    "which seeds Python's, NumPy's and torch's global generators for each sample"
)
_OF_DATASET = (
    f"{_RULE}. Python's, NumPy's and torch's global generators are seeded for each sample, so the data set "
    "has its own generator (made by numpy.random.default_rng() or torch.Generator(), or kept by "
    "albumentations), or it counts, reads the clock, or keeps earlier results. Make such a generator in "
    "__getitem__, seeded with torch.initial_seed()"
)


def check(samples: CompleteSamples, *, is_random: bool) -> None:
    """Fetch a few samples again, in another order, and one by one. Raises DataError, which names the field that differs.

    `is_random`: as in training, with draws; else as in an evaluation. Where batches are padded to their longest sample, what
    two of them share is compared.
    """
    indices = np.array(evenly(len(samples), _FEW))

    def fetch(wanted: np.ndarray) -> dict[str, Tensor]:
        numbers = wanted + len(samples)  # of the second epoch: they are no indices
        return samples.fetch(wanted, HostDraws(0, numbers) if is_random else None)

    arguments = "the same samples with the same draws" if is_random else "the same samples"
    first, again = fetch(indices), fetch(indices)
    _compare(samples, indices, first, again, rounding=0.0, how=f"{arguments} are fetched again")
    turned = {name: field.flip(0) for name, field in fetch(indices[::-1].copy()).items()}
    _compare(samples, indices, first, turned, rounding=_ROUNDING, how=f"{arguments} are fetched in another order")
    for at in range(len(indices)):
        this = slice(at, at + 1)
        own, alone = {name: field[this] for name, field in first.items()}, fetch(indices[this])
        _compare(samples, indices[this], own, alone, rounding=_ROUNDING, how="it is fetched alone, with the same draw")


def _compare(
    samples: CompleteSamples,
    indices: np.ndarray,
    one: dict[str, Tensor],
    other: dict[str, Tensor],
    *,
    rounding: float,
    how: str,
) -> None:
    for name in one:
        for index, left, right in zip(indices, one[name], other[name], strict=True):
            if not _are_same(left, right, rounding):
                hint = _OF_DATASET if isinstance(samples.given, OfDataset) else _OF_FETCH
                raise DataError(f"field {name!r} of sample {index} of {samples.what} differs when {how}. {hint}")


def _are_same(left: Tensor, right: Tensor, rounding: float) -> bool:
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
