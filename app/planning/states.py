"""What an optimizer keeps of each parameter, and what it takes for a step, found by having it take one.

The step is taken on a tiny parameter whose dimensions are different primes, so that those of each state can be told apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from app.optim import from_recipe
from app.planning.ledger import Ledger
from app.recipe import optimizers
from app.recipe.schema import OptimRecipe

Shape = tuple[int, ...]
_PRIMES = (2, 3, 5, 7, 11, 13)


def of_shapes(recipe: OptimRecipe, shapes: Iterable[Shape], *, itemsize: int = 4) -> int:
    """Return the bytes of all states of parameters of these shapes, whose numbers have so many bytes."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    key = _key(recipe)
    return sum(math.prod(_meant(state, shape)) * size for shape in shapes for state, size in _states(key, len(shape), dtype))


def of_step(recipe: OptimRecipe, sizes: Iterable[int], *, on_gpu: bool) -> int:
    """Return the bytes that a step takes beyond all that is kept, for parameters of these sizes in bytes.

    On GPUs torch's optimizers that have no fused kernel step on all parameters at once, and what they work out on the way is as
    large as these, once or more; on a CPU they step on one after the other.
    """
    sizes, kind = list(sizes), optimizers.TABLE[recipe.name].torch_name
    if not sizes or kind in ("Adam", "AdamW") or (kind == "SGD" and on_gpu):  # fused kernels, which work in place
        return 0
    return round(_in_a_step(_key(recipe), on_gpu) * (sum(sizes) if on_gpu else max(sizes)))


def _key(recipe: OptimRecipe) -> tuple[tuple[str, Any], ...]:
    """What of the recipe's section decides which states there are: as a key of a dictionary."""
    plain = {**vars(recipe), "groups": None}
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in plain.items())


@functools.cache
def _states(key: tuple[tuple[str, Any], ...], dimensions: int, dtype: torch.dtype) -> list[tuple[Shape, int]]:
    """The shape of each state of a parameter [2, 3, 5, ...], and the bytes of a number of it."""
    parameter = nn.Parameter(torch.ones(_PRIMES[:dimensions], dtype=dtype))
    optimizer = _stepped(key, [parameter])
    return [
        (tuple(state.shape), state.element_size())
        for state in optimizer.state[parameter].values()
        if isinstance(state, torch.Tensor)
    ]


def _meant(state: Shape, shape: Shape) -> Shape:
    """The shape of a state of a parameter of this shape."""
    return tuple(shape[_PRIMES.index(size)] if size in _PRIMES else size for size in state)


@functools.cache
def _in_a_step(key: tuple[tuple[str, Any], ...], at_once: bool) -> float:
    """The bytes that are allocated at most in a step with states, for each byte of the parameters."""
    parameters = [nn.Parameter(torch.ones(64, 64)) for _ in range(4 if at_once else 1)]
    optimizer = _stepped(key, parameters, foreach=at_once)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    ledger = Ledger()
    there = [state for of_one in optimizer.state.values() for state in of_one.values() if isinstance(state, torch.Tensor)]
    ledger.ignore(iter([*parameters, *there, *(it.grad for it in parameters if it.grad is not None)]))
    with ledger:
        optimizer.step()
    peak = max((sum(held) for held in ledger.peaks.values()), default=0)
    return peak / sum(parameter.nbytes for parameter in parameters)


def _stepped(
    key: tuple[tuple[str, Any], ...], parameters: list[nn.Parameter], *, foreach: bool | None = None
) -> torch.optim.Optimizer:
    module = nn.ParameterDict({f"p{number}_weight": parameter for number, parameter in enumerate(parameters)})
    recipe = OptimRecipe(**dict(key))
    optimizer = from_recipe.build(recipe, module, fused=False if foreach else None)
    for group in optimizer.param_groups:
        if foreach is not None and "foreach" in group:
            group["foreach"] = foreach
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer
