"""Initial weights of an unsharded model: one process, DDP, ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from app.initial.units import Units, as_in, places, popped


@torch.no_grad()
def fill(model: nn.Module, units: Units, note: Callable[[str, Tensor], None] = lambda *_: None) -> None:
    """Give a model on torch's meta device its parameters and buffers on the CPU, with the units' numbers.

    What is one tensor in several places stays one: tied embeddings. `note` is called with each tensor, by its name.
    """
    where = places(model)
    for _, drawn in units.drawn():
        for name, values in popped(drawn):
            module, key = where[name][0]
            meta = getattr(module, key)
            real = as_in(meta, values)
            note(name, real)
            if isinstance(meta, nn.Parameter):
                real = nn.Parameter(real, requires_grad=meta.requires_grad)
            for module, key in where[name]:
                setattr(module, key, real)
