"""The part of a model that one rank of tensor parallelism has: layers with fewer rows or columns, as transformers' plan says.

A trace of it is one of the rank's own work. What the ranks send one another is as large as the activations that are there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from app.errors import RecipeError
from app.planning.model import Blueprint

_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")


def of_one_rank(blueprint: Blueprint, ranks: int) -> Blueprint:
    """Return the model that one of so many ranks computes with. Raises RecipeError if the model has no plan."""
    plan = plan_of(blueprint.model)
    if not plan:
        raise RecipeError(
            f"{type(blueprint.model).__name__} has no plan for tensor parallelism: it must be of transformers, and of an "
            "architecture that names one (_tp_plan), as llama, qwen3 and mistral do"
        )
    model = copy.deepcopy(blueprint.model)
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style is not None:
            _cut(name, module, style, ranks, made)
    return replace(blueprint, model=model)


def plan_of(model: Any) -> dict[str, str]:
    """Return the model's plan: the style of each layer, by a pattern of its name."""
    return {pattern: str(style) for pattern, style in (getattr(model, "tp_plan", None) or {}).items()}


def _cut(name: str, module: nn.Module, style: str, ranks: int, made: dict[int, nn.Parameter]) -> None:
    """Leave a layer the part of one rank; `made` has the parts of weights that stand in several places."""
    is_table = isinstance(module, nn.Embedding)
    if style in _ROWS:
        dimension = 1 if is_table else 0
    elif style in _COLUMNS:
        dimension = 0 if is_table else 1
    else:
        return
    weight: Any = module.weight
    if id(weight) not in made:
        if weight.shape[dimension] % ranks:
            raise RecipeError(f"{name} has {weight.shape[dimension]} rows or columns, which {ranks} ranks cannot divide")
        part = weight.narrow(dimension, 0, weight.shape[dimension] // ranks).clone()
        made[id(weight)] = nn.Parameter(part, requires_grad=weight.requires_grad)
    module.weight = made[id(weight)]
    bias: Any = getattr(module, "bias", None)
    if bias is not None and dimension == 0:
        module.bias = nn.Parameter(bias[: len(bias) // ranks].clone(), requires_grad=bias.requires_grad)
