"""What a rank holds of a model before it is prepared: all of it, or a flat range of each parameter, and buffers whole.

Under FSDP2 and ZeRO-3 a model that is filled unit by unit is divided from the beginning. Whoever reads weights into it, or
looks at them, does it by these ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.data import hash64
from app.initial import fsdp2, zero3

_CHUNK = 1 << 16
"""Elements that are hashed at a time: what fits the processor's caches."""


@dataclass(frozen=True, eq=False)
class Held:
    """Consecutive elements of a parameter or buffer."""

    name: str
    """The first that it has in the model."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Index of the first element in the flattened tensor."""
    values: Tensor
    """The elements, 1-D, on any device: live."""
    is_parameter: bool

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.values.dtype


def held(model: nn.Module) -> dict[str, Held]:
    """Return what this rank has of each parameter and buffer, by all of its names; what is tied is one `Held`."""
    found: dict[int, Held] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: found.setdefault(id(tensor), _held(name, tensor)) for name, tensor in named}


def is_divided(model: nn.Module) -> bool:
    """Whether each rank holds a part of the parameters."""
    return any(isinstance(parameter, DTensor) or zero3.is_divided(parameter) for parameter in model.parameters())


def digest(model: nn.Module, gather: Callable[[Any], list[Any]]) -> str:
    """Return a hash of the model's parameters and buffers, of 16 hexadecimal digits: the same one however it is divided.

    Called by all ranks together; `gather` returns every rank's value.
    """
    tensors = {id(it): it for it in held(model).values()}.values()
    parameters = sum(digest_of(it.name, it.values, it.start) for it in tensors if it.is_parameter)
    if is_divided(model):
        parameters = sum(gather(parameters))
    return as_text(parameters + sum(digest_of(it.name, it.values, it.start) for it in tensors if not it.is_parameter))


def digest_of(name: str, values: Tensor, start: int = 0) -> int:
    """Return a number for the elements from `start` on of a tensor; those of its ranges add up to that of the whole."""
    key = hash64.derive_key(0, name, str(values.dtype))
    flat, total = values.detach().reshape(-1), 0
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK].cpu().contiguous()
        bits = part.view(torch.uint8).numpy().reshape(part.numel(), -1)
        numbers = bits.view(f"u{bits.shape[1]}").astype(np.uint64).reshape(-1)
        places = np.arange(start + at, start + at + part.numel(), dtype=np.uint64)
        places *= np.uint64(hash64.GOLDEN64)
        places ^= np.uint64(key)
        numbers *= np.uint64(hash64.MIX_FIRST)
        numbers += places
        total += int(hash64.mix64_array(numbers).sum(dtype=np.uint64))
    return total & hash64.MASK64


def as_text(total: int) -> str:
    """Return a sum of `digest_of` as digits."""
    return f"{total & hash64.MASK64:016x}"


def _held(name: str, tensor: Tensor) -> Held:
    is_parameter = isinstance(tensor, nn.Parameter)
    if isinstance(tensor, DTensor):
        start, values = fsdp2.rows(name, tensor)
        return Held(name, tuple(tensor.shape), start, values, is_parameter)
    if zero3.is_divided(tensor):
        shape, start, values = zero3.flat_range(tensor)
        return Held(name, shape, start, values[: max(0, min(values.numel(), prod(shape) - start))], is_parameter)
    return Held(name, tuple(tensor.shape), 0, tensor.detach().view(-1), is_parameter)
