"""A recipe's model and an example of its batches, without numbers: what a plan is made of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app import own_layers, tasks
from app.errors import DataError, RecipeError
from app.initial.units import block_classes, places
from app.initial.zero3 import transformers_unaware
from app.optim import freezing
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe
from app.task import Form, NeedsData, Task

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """How large a model is, in elements; what is tied counts once."""

    parameters: int
    trainable: int
    buffers: int
    """Bytes of the buffers."""
    largest_unit: int
    """Of a block, or of the largest layer that is in no block: what FSDP2 and ZeRO-3 gather at once at least."""
    blocks: int
    """How many blocks there are; 0: the model names none."""
    parameters_of_block: int
    """Of the first of them."""


@dataclass(frozen=True)
class Blueprint:
    """A task's model on torch's meta device."""

    task: Task
    facts: Mapping[str, Any]
    model: nn.Module
    blocks: tuple[str, ...]
    """Names of the blocks that stand in a list and are alike, in their order; empty: there are none."""
    classes: frozenset[str]
    """Classes of the model's blocks, by which FSDP2 divides."""

    @functools.cached_property
    def sizes(self) -> Sizes:
        """How large the model is."""
        parameters = list(self.model.parameters())
        blocks = [module for module in self.model.modules() if type(module).__name__ in self.classes]
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        outside = [parameter.numel() for parameter in parameters if id(parameter) not in inside]
        of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        return Sizes(
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            buffers=sum(buffer.nbytes for buffer in self.model.buffers()),
            largest_unit=max([*outside, *of_blocks]),
            blocks=len(blocks),
            parameters_of_block=of_blocks[0] if of_blocks else 0,
        )

    def cut_to(self, depth: int) -> Blueprint:
        """Return one with so many of its blocks."""
        blocks = self.model.get_submodule(self.blocks[0].rpartition(".")[0])
        left_out = {id(block): nn.Identity() for block in list(blocks.children())[depth:]}  # not copied: a deep model has many
        model = copy.deepcopy(self.model, left_out)
        del model.get_submodule(self.blocks[0].rpartition(".")[0])[depth:]  # type: ignore[operator]
        return replace(self, model=model, blocks=self.blocks[:depth])


@functools.lru_cache(maxsize=8)
def blueprint(recipe: Recipe) -> Blueprint:
    """Return the recipe's model without numbers.

    The data is opened if it is there, which tells what the model must know of it. Raises DataError if it is not, and the task
    does not say it by the recipe alone (`facts_without_data`), and RecipeError.
    """
    task = tasks.of(recipe)
    facts = _facts(task)
    with transformers_unaware(), torch.device("meta"):
        model = task.model(facts)
    model = model.to("meta")  # buffers that were made on a device by name
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    model = model.to(getattr(torch, recipe.train.dtype))
    freezing.freeze(model, recipe.train.freeze or ())
    classes = frozenset(block_classes(task, model))
    return Blueprint(task, facts, model, _alike(model, classes), classes)


def of_model(recipe: Recipe | LoadedRecipe) -> Sizes:
    """Return how large a recipe's model is. Raises as `blueprint`."""
    return blueprint(recipe.recipe if isinstance(recipe, LoadedRecipe) else recipe).sizes


def _facts(task: Any) -> Mapping[str, Any]:
    try:
        samples = task.samples("train")
    except DataError:
        if not hasattr(task, "facts_without_data"):
            raise
        found: Mapping[str, Any] = task.facts_without_data()
        return found
    return samples.facts  # type: ignore[no-any-return]


def _alike(model: nn.Module, classes: frozenset[str]) -> tuple[str, ...]:
    """The blocks, if all stand in one list, and have the same parameters."""
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    shapes = {tuple((key, it.shape, it.requires_grad) for key, it in module.named_parameters()) for _, module in named}
    parents = {name.rpartition(".")[0] for name, _ in named}
    if len(shapes) != 1 or len(parents) != 1:
        return ()
    parent = model.get_submodule(next(iter(parents)))
    return tuple(name for name, _ in named) if isinstance(parent, nn.ModuleList) and len(parent) == len(named) else ()


def bring_to_cpu(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Give a model on torch's meta device its place on the CPU, or as fake tensors if that mode is on; `dtype`: of weights."""
    for standing in places(model).values():
        module, key = standing[0]
        meta = getattr(module, key)
        kind = dtype if dtype is not None and meta.is_floating_point() else meta.dtype
        made: Tensor = torch.empty_strided(meta.shape, meta.stride(), device="cpu", dtype=kind)
        if isinstance(meta, nn.Parameter):
            made = nn.Parameter(made, requires_grad=meta.requires_grad)
        for module, key in standing:
            setattr(module, key, made)
    return model.train()


def batch_of(blueprint: Blueprint, size: int, form: Form) -> dict[str, Any]:
    """Return a batch of so many samples on the CPU, as `ready` returns it, without numbers.

    Raises RecipeError for a task that shows none without data.
    """
    try:
        example = blueprint.task.example(blueprint.facts, form)
    except NeedsData:
        raise RecipeError(
            f"{type(blueprint.task).__name__} has no example batch, so its memory cannot be planned without "
            "data: give the task a method example(self, facts, form) (docs/your-own-task.md)"
        ) from None
    two = len(example["samples"])

    def grown(field: Any) -> Any:
        if isinstance(field, np.ndarray):
            return np.arange(size) if field.shape[:1] == (two,) else field
        if not isinstance(field, Tensor):
            return field
        shape = (size, *field.shape[1:]) if field.shape[:1] == (two,) else tuple(field.shape)
        made = torch.empty(shape, dtype=field.dtype, device="cpu")
        is_last = field.ndim == 4 and field.is_contiguous(memory_format=torch.channels_last) and not field.is_contiguous()
        return made.to(memory_format=torch.channels_last) if is_last else made

    return pytree.tree_map(grown, example)  # type: ignore[no-any-return]


def called(model: nn.Module, precision: str, *, by_autocast: bool) -> Callable[..., Any]:
    """Return what calls the model in this precision, as Accelerate does: outputs are in float32 again."""
    half = HALVES.get(precision)
    if half is None or not by_autocast:
        return model

    def call(*inputs: Any, **named: Any) -> Any:
        with torch.autocast("cpu", half):
            out = model(*inputs, **named)
        return pytree.tree_map_only(Tensor, lambda it: it.float() if it.dtype in own_layers.HALF else it, out)

    return call
