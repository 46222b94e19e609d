"""The tensors of a model before it is prepared, on this rank: the whole model, or a region of each parameter and all buffers.

Under FSDP2 and ZeRO-3 a model that is filled unit by unit is sharded from the beginning. Weights are read into it, checked and
hashed by these regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.data import order
from app.distributed.runtime import Runtime
from app.errors import TrainingError
from app.init import zero3
from app.init.region import BUFFER, WEIGHT, Piece, Region, copies

_CHUNK = 1 << 16
"""Elements that are hashed at a time, which fit the processor's caches."""


def held(model: nn.Module) -> dict[str, Piece]:
    """Return this rank's share of each parameter and buffer, by all of its names; a tied tensor is one `Piece`."""
    found: dict[int, Piece] = {}
    divided = is_divided(model)
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: found.setdefault(id(tensor), _held(name, tensor, divided=divided)) for name, tensor in named}


def is_divided(model: nn.Module) -> bool:
    """Return whether each rank holds a part of the parameters."""
    return any(isinstance(parameter, DTensor) or zero3.is_divided(parameter) for parameter in model.parameters())


def check_finite(runtime: Runtime, model: nn.Module, source: str) -> None:
    """Raise TrainingError, on all ranks, for a weight from `source` that is not finite; a mask in a buffer can be infinite."""
    with runtime.together():
        for it in held(model).values():
            if not it.values.dtype.is_floating_point or not it.values.numel():
                continue
            extremes = [float(value) for value in it.values.aminmax()]  # without memory; a NaN is both of them
            wrong = [value for value in extremes if math.isnan(value) or (it.key == WEIGHT and math.isinf(value))]
            if wrong:
                raise TrainingError(
                    f"the initial weights from {source} contain {wrong[0]}, in {it.name}: nothing can be trained from them. "
                    "Use weights that are finite, or correct what initializes this tensor."
                )


def digest(model: nn.Module, gather: Callable[[Any], list[Any]]) -> str:
    """Return a hash of the model's parameters and buffers, of 16 hexadecimal digits, which does not depend on the sharding.

    Called by all ranks together; `gather` returns every rank's value.
    """
    tensors = {id(it): it for it in held(model).values()}.values()
    parameters = sum(digest_of(it.name, it.values, it.region) for it in tensors if it.key == WEIGHT and it.copies[1] == 0)
    if is_divided(model):
        parameters = sum(gather(parameters))
    return as_text(parameters + sum(digest_of(it.name, it.values) for it in tensors if it.key == BUFFER))


def digest_of(name: str, values: Tensor, region: Region | None = None) -> int:
    """Return a number for the elements `region` of a tensor, or all; the numbers of its regions add up to its own."""
    key = order.derive_key(0, name, str(values.dtype))
    flat, total = values.detach().reshape(-1), 0
    region = region or Region.flat(0, flat.numel())
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK].cpu().contiguous()
        bits = part.view(torch.uint8).numpy().reshape(part.numel(), -1)
        numbers = bits.view(f"u{bits.shape[1]}").astype(np.uint64).reshape(-1)
        places = _places(region, at, at + part.numel())
        places *= np.uint64(order.GOLDEN64)
        places ^= np.uint64(key)
        numbers *= np.uint64(order.MIX_FIRST)
        numbers += places
        total += int(order.mix64_array(numbers).sum(dtype=np.uint64))
    return total & order.MASK64


def _places(region: Region, first: int, stop: int) -> np.ndarray:
    """Return the indices of a region's elements first .. stop - 1 in the flattened tensor."""
    if region.runs <= 1:
        return np.arange(region.start + first, region.start + stop, dtype=np.uint64)
    lines, within = np.divmod(np.arange(first, stop, dtype=np.uint64), np.uint64(region.run))
    lines *= np.uint64(region.stride)
    lines += within
    lines += np.uint64(region.start)
    return lines


def as_text(total: int) -> str:
    """Return a sum of `digest_of` as digits."""
    return f"{total & order.MASK64:016x}"


def _held(name: str, tensor: Tensor, *, divided: bool) -> Piece:
    key = WEIGHT if isinstance(tensor, nn.Parameter) else BUFFER
    if zero3.is_divided(tensor):
        shape, start, values = zero3.flat_range(tensor)
        count = max(0, min(values.numel(), prod(shape) - start))
        return Piece(key, name, shape, Region.flat(start, count), values[:count])
    number = copies(tensor, name) if divided and key == WEIGHT else (1, 0)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Piece(key, name, tuple(tensor.shape), Region.of(tensor, name), local.detach().view(-1), number)
