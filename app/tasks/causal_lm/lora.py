"""Adapters of low rank beside frozen layers (LoRA, Hu et al. 2021, arXiv:2106.09685), by peft.

A layer `q_proj` becomes one of peft's: its own weights are `q_proj.base_layer.*` then, and what is trained is
`q_proj.lora_A.default.weight` [rank, inputs] and `q_proj.lora_B.default.weight` [outputs, rank].
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from app.errors import RecipeError
from app.files import other_libraries
from app.task import Adapters, LowRank
from app.tasks.causal_lm.sections import ModelRecipe

_NAME = "default"
"""peft's default name for a single set of adapters."""


def add(model: nn.Module, recipe: ModelRecipe) -> None:
    """Give the chosen layers adapters, and freeze all else. Raises RecipeError for layers that cannot have them."""
    try:
        with warnings.catch_warnings():  # that layers of GPT-2 hold their weights transposed, which it then sees to
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
            other_libraries.add_lora(config_of(recipe), model, _NAME)
    except ValueError as error:
        raise RecipeError(f"model.lora_targets is {recipe.lora_targets}: {error}") from error


def config_of(recipe: ModelRecipe) -> Any:
    """Return peft's configuration of the adapters."""
    targets = "all-linear" if recipe.lora_targets is None else list(recipe.lora_targets)
    alpha = 2 * (recipe.lora_rank or 0) if recipe.lora_alpha is None else recipe.lora_alpha
    try:
        return other_libraries.lora_config(r=recipe.lora_rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    except ImportError as error:
        raise RecipeError('model.lora_rank is set, which needs peft: pip install "samerun[lora]"') from error


def initialize(module: nn.Module) -> None:
    """Draw a layer's adapters as peft does, if it has some: the first at random, the second 0, so that nothing is added yet."""
    if _has_adapters(module):
        layer: Any = module
        layer.reset_lora_parameters(_NAME, True)


def adapters(model: nn.Module, recipe: ModelRecipe) -> Adapters:
    """Return how the weights of a model with adapters go into files."""
    names: dict[str, str] = {}
    sums: dict[str, LowRank] = {}
    layers: Any = model.named_modules()
    for place, layer in layers:
        if not _has_adapters(layer):
            continue
        names |= {f"{place}.base_layer.{name}": f"{place}.{name}" for name, _ in layer.base_layer.named_parameters()}
        down, up = f"{place}.lora_A.{_NAME}.weight", f"{place}.lora_B.{_NAME}.weight"
        sums[f"{place}.weight"] = LowRank(down, up, layer.scaling[_NAME], bool(layer.fan_in_fan_out))
    alone = {
        name: f"base_model.model.{name.replace(f'.{_NAME}.', '.')}" for low in sums.values() for name in (low.down, low.up)
    }
    return Adapters(names, sums, alone, _about(recipe, transposed=any(low.transposed for low in sums.values())))


def _has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "reset_lora_parameters")  # of all kinds of layers that peft puts in the place of others


def _about(recipe: ModelRecipe, *, transposed: bool) -> dict[str, Any]:
    """What adapter_config.json says: what peft needs to put the adapters beside the layers again."""
    config = config_of(recipe)
    config.inference_mode, config.fan_in_fan_out = True, transposed
    said = config.to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in said.items()}
