"""Random numbers without state: each is a hash of (seed, sample number, purpose).

A sample number is epoch * dataset size + index (see `order.py`). So a sample gets the same numbers in any batch, on any
rank, in any worker, after any resume. `Draws` gives them for a batch, on the device of its sample numbers, with bits
that are equal on every device; `HostDraws` gives them to the host, where samples are made, and `SampleDraws` returns one
sample's in plain Python, for what is made one at a time. What `Draws` derives from the bits is exact as well,
except `beta` and `normal` (float32 rounding).

One number for each sample is computed on the host, if that has the sample numbers too, and copied: 20 us, whereas a device is
given two dozen operations on as few numbers.

    draws = Draws(seed, batch["samples"])
    flip = draws.uniform("flip") < 0.5
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.data.order import GOLDEN64, MIX_FIRST, MIX_SECOND, derive_key, mix64, mix64_array

Shape = tuple[int, ...] | int
"""Shape of a sample's random numbers; N is the same as (N,)."""
_MAX_INT64 = 2**63 - 1
_BITS24 = 2**24 - 1


class Draws:
    """Random numbers for a batch of samples; shapes below are for sample numbers int64 [B]."""

    def __init__(self, seed: int, samples: Tensor, numbers: NDArray[np.int64] | None = None) -> None:
        """`numbers` are the sample numbers on the host, which `on_host` needs: `samples` may be on another device."""
        self._seed, self._samples, self._numbers = seed, samples, numbers

    @functools.cached_property
    def _base(self) -> Tensor:
        return mix64_tensor(self._samples + _signed(derive_key(self._seed, "draws")))

    def streams(self, count: int) -> Draws:
        """Return `count` independent sets of draws for each sample: all that they draw is [count, B]."""
        lanes = torch.arange(count, device=self._base.device).unsqueeze(1)
        return Draws(self._seed, self._base + lanes)

    def every(self, count: int) -> Draws:
        """Return the draws of the first of each `count` samples: of pairs that share one, for instance."""
        return Draws(self._seed, self._samples[::count], None if self._numbers is None else self._numbers[::count])

    def bits(self, purpose: str, shape: Shape = ()) -> Tensor:
        """Return 64 random bits for each sample, or for each element of a shape: int64 [B, *shape]."""
        shape = (shape,) if isinstance(shape, int) else shape
        if self._numbers is not None:
            bits = self._sent(self.on_host.bits(purpose).view(np.int64))
        else:
            bits = mix64_tensor(self._base ^ _signed(derive_key(0, "purpose", purpose)))
        if not shape:
            return bits
        lanes = torch.arange(1, math.prod(shape) + 1, device=bits.device) * _signed(GOLDEN64)
        return mix64_tensor(bits.unsqueeze(-1) + lanes).view(*bits.shape, *shape)

    def uniform(self, purpose: str, shape: Shape = ()) -> Tensor:
        """Return float32 [B, *shape] in [0, 1), multiples of 2**-24: all that float32 can tell apart just below 1."""
        if self._numbers is not None and not shape:
            return self._sent(self.on_host.uniform(purpose))
        return _unit(_shift_right(self.bits(purpose, shape), 40))

    def normal(self, purpose: str, shape: Shape = ()) -> Tensor:
        """Return float32 [B, *shape] from the standard normal distribution, by the method of Box and Muller."""
        bits = self.bits(purpose, shape)
        radius = torch.sqrt(-2 * torch.log1p(-_unit(_shift_right(bits, 40)).double()))
        return (radius * torch.cos(_unit(_shift_right(bits, 16) & _BITS24).double() * (2 * math.pi))).float()

    def integers(self, purpose: str, high: int | Tensor) -> Tensor:
        """Return int64 [B] in [0, high), for high of at least 1 (one number, or int64 [B]). Its bias is high / 2**63."""
        return (self.bits(purpose) & _MAX_INT64) % high

    @functools.cached_property
    def on_host(self) -> HostDraws:
        """The same draws without waiting for the device."""
        assert self._numbers is not None, "the sample numbers are only on the device"
        return HostDraws(self._seed, self._numbers)

    def _sent(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._samples.device, non_blocking=True)

    def beta(self, purpose: str, alpha: float) -> Tensor:
        """Return float32 [B] in [0, 1] from the distribution Beta(alpha, alpha), alpha > 0.

        2 * beta - 1 is t / sqrt(2 * alpha + t**2) for a Student t with 2 * alpha degrees of freedom, and Bailey's polar
        method (1994, Math. Comp. 62, "Polar generation of random variates with the t-distribution") makes t from two uniform
        numbers: t**2 / (2 * alpha) = (u**(-1/alpha) - 1) * cos(angle)**2. It is exact for every alpha, without a loop or
        a table; Devroye (1996, "Random variate generation in one line of code") gives it as one line. Here the sign has a
        bit of its own and the angle stays in one quadrant, as a sine, so that float32 keeps relative precision near 0.
        """
        bits = self.bits(purpose)
        log_u = torch.log1p(-_unit(_shift_right(bits, 40)))
        sine = torch.sin((1 - _unit(_shift_right(bits, 16) & _BITS24)) * (math.pi / 2))
        power = torch.exp(log_u / alpha)
        rest = -torch.expm1(log_u / alpha)
        distance = (sine * torch.sqrt(rest / (power + rest * sine**2))).clamp_(max=1)  # rounding may pass 1
        return (1 + torch.where(bits & 1 == 1, distance, -distance)) / 2


class SampleDraws:
    """The same random numbers as `Draws`, for one sample, in plain Python (about 2 us each)."""

    def __init__(self, seed: int, sample: int) -> None:
        self._base = mix64(sample + derive_key(seed, "draws"))

    def uniform(self, purpose: str) -> float:
        """Return a number in [0, 1): the value of `Draws.uniform`."""
        return (self._bits(purpose) >> 40) * 2.0**-24

    def integers(self, purpose: str, high: int) -> int:
        """Return a whole number in [0, high): the value of `Draws.integers`."""
        return (self._bits(purpose) & _MAX_INT64) % high

    def _bits(self, purpose: str) -> int:
        return mix64(self._base ^ derive_key(0, "purpose", purpose))


class HostDraws:
    """The same random numbers as `Draws`, for a batch of samples on the host, in NumPy."""

    def __init__(self, seed: int, samples: NDArray[np.int64]) -> None:
        self._seed = seed
        self.samples = samples
        """Sample numbers, int64 [B]."""

    def at(self, positions: NDArray[np.int64]) -> HostDraws:
        """Return the random numbers of the samples at these positions in the batch, int64 [n]."""
        return HostDraws(self._seed, self.samples[positions])

    def of(self, position: int) -> SampleDraws:
        """Return the random numbers of the sample at a position in the batch."""
        return SampleDraws(self._seed, int(self.samples[position]))

    def uniform(self, purpose: str, shape: Shape = ()) -> NDArray[np.float32]:
        """Return float32 [B, *shape] in [0, 1): the values of `Draws.uniform`."""
        uniform: NDArray[np.float32] = (self.bits(purpose, shape) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return uniform

    def normal(self, purpose: str, shape: Shape = ()) -> NDArray[np.float32]:
        """Return float32 [B, *shape] from the standard normal distribution: the values of `Draws.normal`, up to rounding."""
        bits = self.bits(purpose, shape)
        radius = np.sqrt(-2 * np.log1p(-((bits >> np.uint64(40)) * 2.0**-24)))
        angle = ((bits >> np.uint64(16)) & np.uint64(_BITS24)) * (2.0**-24 * 2 * np.pi)
        normal: NDArray[np.float32] = (radius * np.cos(angle)).astype(np.float32)
        return normal

    def integers(self, purpose: str, high: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64 [B] in [0, high), for high of at least 1 (one number, or int64 [B]): the values of `Draws.integers`."""
        integers: NDArray[np.int64] = (self.bits(purpose) & np.uint64(_MAX_INT64)).astype(np.int64) % high
        return integers

    @functools.cached_property
    def _base(self) -> NDArray[np.uint64]:
        mixed: NDArray[np.uint64] = mix64_array(self.samples.astype(np.uint64) + np.uint64(derive_key(self._seed, "draws")))
        return mixed

    def bits(self, purpose: str, shape: Shape = ()) -> NDArray[np.uint64]:
        """Return 64 random bits for each sample, or for each element of a shape, uint64 [B, *shape], equal to `Draws.bits`."""
        shape = (shape,) if isinstance(shape, int) else shape
        bits: NDArray[np.uint64] = mix64_array(self._base ^ np.uint64(derive_key(0, "purpose", purpose)))
        if shape:
            lanes = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(GOLDEN64)
            bits = mix64_array(bits[:, None] + lanes).reshape(*bits.shape, *shape)
        return bits


def mix64_tensor(values: Tensor) -> Tensor:
    """Return `hash64.mix64` of each number; int64 holds the bits of the unsigned result, and products wrap round."""
    values = (values ^ _shift_right(values, 30)).mul_(_signed(MIX_FIRST))
    values = values.bitwise_xor_(_shift_right(values, 27)).mul_(_signed(MIX_SECOND))
    return values.bitwise_xor_(_shift_right(values, 31))


def _shift_right(values: Tensor, places: int) -> Tensor:
    # torch shifts int64 with the sign, the hash without: the mask takes the copies of the sign bit away.
    return (values >> places).bitwise_and_((1 << (64 - places)) - 1)


def _unit(bits24: Tensor) -> Tensor:
    return bits24.to(torch.float32).mul_(2.0**-24)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
