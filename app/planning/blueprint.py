"""A recipe's model and an example of its batches, without numbers: what a plan is made of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app import tasks
from app.errors import DataError, RecipeError
from app.init.filling import transformers_unaware
from app.init.tensor_parallel import DIVIDED, check, rules_of
from app.init.units import block_classes, places
from app.optim import parameter_groups
from app.recipe.schema import Recipe
from app.task import Form, NeedsData

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Blueprint:
    """A task's model on torch's meta device."""

    task: Any
    facts: Mapping[str, Any]
    model: nn.Module
    blocks: tuple[str, ...]
    """Names of the blocks, in order, if all are alike and in one list; else empty."""
    classes: frozenset[str]
    """Classes of the model's blocks, by which FSDP2 shards."""

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @functools.cached_property
    def trainable(self) -> int:
        """Number of parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @functools.cached_property
    def largest_unit(self) -> int:
        """Parameters of the largest block or tensor outside of blocks: FSDP2 and ZeRO-3 gather at least as many at once."""
        blocks = [list(it.parameters()) for it in self.model.modules() if type(it).__name__ in self.classes]
        inside = {id(parameter) for block in blocks for parameter in block}
        outside = [parameter.numel() for parameter in self.model.parameters() if id(parameter) not in inside]
        return max([*outside, *(sum(parameter.numel() for parameter in block) for block in blocks)])

    def cut_to(self, depth: int) -> Blueprint:
        """Return a copy with the first `depth` blocks."""
        parent = self.blocks[0].rpartition(".")[0]
        blocks = self.model.get_submodule(parent)
        left_out = {id(block): nn.Identity() for block in list(blocks.children())[depth:]}  # not copied: a deep model has many
        model = copy.deepcopy(self.model, left_out)
        del model.get_submodule(parent)[depth:]  # type: ignore[operator]
        return replace(self, model=model, blocks=self.blocks[:depth])


@functools.lru_cache(maxsize=8)
def build_blueprint(recipe: Recipe) -> Blueprint:
    """Return the recipe's model without numbers.

    The data is opened if it exists, because the model can depend on it. Raises DataError if it does not exist and the recipe
    alone does not determine the model (`metadata_without_data`), and RecipeError.
    """
    task: Any = tasks.of(recipe)
    try:
        facts = task.samples("train").facts
    except DataError:
        facts = task.metadata_without_data()
        if facts is None:
            raise
    with transformers_unaware(), torch.device("meta"):
        model = task.model(facts)
    model = model.to("meta")  # buffers that were made on a device by name
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    model = model.to(getattr(torch, recipe.train.dtype))
    parameter_groups.freeze(model, recipe.train.freeze or ())
    classes = frozenset(block_classes(task, model))
    return Blueprint(task, facts, model, _equal_blocks(model, classes), classes)


def _equal_blocks(model: nn.Module, classes: frozenset[str]) -> tuple[str, ...]:
    """Return the names of all blocks if they are in one list and have the same parameters."""
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    shapes = {tuple((key, it.shape, it.requires_grad) for key, it in module.named_parameters()) for _, module in named}
    parents = {name.rpartition(".")[0] for name, _ in named}
    if len(shapes) != 1 or len(parents) != 1:
        return ()
    parent = model.get_submodule(next(iter(parents)))
    return tuple(name for name, _ in named) if isinstance(parent, nn.ModuleList) and len(parent) == len(named) else ()


@functools.lru_cache(maxsize=8)
def rank_blueprint(recipe: Recipe, tensor_parallel: int) -> Blueprint:
    """Return the part of the model that one process computes with, by the rules of real runs. Raises PresetError."""
    whole = build_blueprint(recipe)
    if tensor_parallel == 1:
        return whole
    check(whole.model, tensor_parallel)
    model = copy.deepcopy(whole.model)
    parts: dict[int, nn.Parameter] = {}  # by the whole weight, which can belong to several layers
    for name, rule in rules_of(model, tensor_parallel).items():
        if (dimension := DIVIDED.get(rule)) is None:
            continue
        module: Any = model.get_submodule(name)
        weight = module.weight
        if id(weight) not in parts:
            part = weight.narrow(dimension, 0, weight.shape[dimension] // tensor_parallel).clone()
            parts[id(weight)] = nn.Parameter(part, requires_grad=weight.requires_grad)
        module.weight, bias = parts[id(weight)], getattr(module, "bias", None)
        if bias is not None and dimension == 0:
            part = bias[: len(bias) // tensor_parallel].clone()
            module.bias = nn.Parameter(part, requires_grad=bias.requires_grad)
    return replace(whole, model=model)


def bring_to_cpu(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Allocate a model on the CPU (as fake tensors if that mode is on) and set it to training; `dtype`: of weights."""
    for uses in places(model).values():
        module, key = uses[0]
        meta = getattr(module, key)
        kind = dtype if dtype is not None and meta.is_floating_point() else meta.dtype
        made: Tensor = torch.empty_strided(meta.shape, meta.stride(), device="cpu", dtype=kind)
        if isinstance(meta, nn.Parameter):
            made = nn.Parameter(made, requires_grad=meta.requires_grad)
        for module, key in uses:
            setattr(module, key, made)
    model.train()


def make_batch(blueprint: Blueprint, size: int, form: Form) -> dict[str, Any]:
    """Return a batch of `size` samples on the CPU, as `preprocess` returns it, without numbers.

    Raises RecipeError for a task that has no example without data.
    """
    try:
        example = blueprint.task.example(blueprint.facts, form)
    except NeedsData:
        raise RecipeError(
            f"{type(blueprint.task).__name__} has no example batch, so its memory cannot be planned without "
            "data: give the task a method example(self, facts, form) (docs/your-own-task.md)"
        ) from None
    two = len(example["samples"])

    def resized(field: Any) -> Any:
        if isinstance(field, np.ndarray):
            return np.arange(size) if field.shape[:1] == (two,) else field
        if not isinstance(field, Tensor):
            return field
        shape = (size, *field.shape[1:]) if field.shape[:1] == (two,) else tuple(field.shape)
        made = torch.empty(shape, dtype=field.dtype, device="cpu")
        is_last = field.ndim == 4 and field.is_contiguous(memory_format=torch.channels_last) and not field.is_contiguous()
        return made.to(memory_format=torch.channels_last) if is_last else made

    return pytree.tree_map(resized, example)  # type: ignore[no-any-return]
