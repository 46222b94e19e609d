"""The optimizer of a recipe with its parameter groups, and frozen parameters.

`app/recipe/optimizers.py` lists the optimizers.

A normalization layer all of whose own parameters are frozen keeps its running statistics too, and normalizes by them while it
trains, as in an evaluation: otherwise it would keep changing, by statistics of micro-batches, which depend on how many
processes there are. Dropout in frozen layers stays on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim.sgd import sgd

from app.environment.topology import listed
from app.errors import RecipeError, did_you_mean
from app.optim import foreign
from app.optim.muon import Muon
from app.recipe import optimizers
from app.recipe.schema import OptimRecipe

# Kinds of device on which torch (2.8 and later) has a fused Adam, AdamW and SGD: one pass over the weights instead of several.
FUSED_DEVICES = {"cpu", "cuda"}


# Settings of torch's optimizers that choose how a step is computed, not what it computes.
_ONLY_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class Rule:
    """The settings with which a step updates each parameter: the recipe's, and those that torch adds by default."""

    kind: type[torch.optim.Optimizer]
    """The class that steps."""
    settings: Mapping[str, Any]
    """Its settings, by its own names, but for the weight decay. The learning rate is the peak of the recipe, unscaled."""
    weight_decays: Mapping[str, float]
    """The weight decay of each trainable parameter, by name."""
    lr_factors: Mapping[str, float]
    """Factor of the learning rate of each trainable parameter."""
    sizes: Mapping[str, int]
    """Number of elements of each trainable parameter."""
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that Muon steps on, if it is the optimizer."""
    scalars: tuple[str, ...] = ("step", "mu_product")
    """Names of the states that are not per element, and alike for all parameters; the default fits torch and DeepSpeed."""
    counted: tuple[str, ...] = ()
    """Names of the settings of its groups that its own steps change, as schedule-free optimizers count there."""

    @classmethod
    def of(cls, recipe: OptimRecipe, model: nn.Module, blocks: Collection[str] = ()) -> Rule:
        """Return the rule for a model whose parameters are not sharded yet: the weight decay follows from names and shapes.

        `blocks` are the classes of the blocks. Raises RecipeError for a setting that the class refuses, for a
        group that is of no parameter, for a decay by layers of a model without blocks, and for Muon without a matrix.
        """
        kind, chosen = _chosen(recipe)
        (group,) = made(kind, [nn.Parameter(torch.zeros(1))], chosen).param_groups  # with what the class adds
        settings = {name: value for name, value in group.items() if name not in _ONLY_HOW | {"weight_decay"}}
        groups, names = recipe.groups or {}, [name for name, _ in model.named_parameters()]
        group_of = {name: next((pattern for pattern in groups if fnmatchcase(name, pattern)), "") for name in names}
        for pattern in groups:
            if pattern not in group_of.values():
                raise RecipeError(
                    f"optim.groups has {pattern}, which matches no parameter that earlier groups do not match (the first "
                    f"match counts: put the narrower pattern first): {near(pattern, names)}"
                )
        by_layer = _layer_factors(recipe.layer_decay, model, blocks)
        weight_decays, lr_factors, sizes = {}, {}, {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = groups.get(group_of[name], {})
                by_default = recipe.weight_decay if decays(name, parameter) else 0.0
                weight_decays[name] = own.get("weight_decay", by_default)
                lr_factors[name], sizes[name] = own.get("lr_factor", 1.0) * by_layer.get(name, 1.0), parameter.numel()
        matrices = by_muon(model, blocks) if kind is Muon else frozenset()
        if kind is Muon and not matrices:
            raise RecipeError(
                f"optim.name is muon, which steps on matrices inside blocks, and the model, a {type(model).__name__}, has none "
                "that are trained: use adamw, or name the classes of its blocks in the task (blocks)"
            )
        return cls(kind, settings, weight_decays, lr_factors, sizes, matrices)

    def notes(self) -> list[str]:
        """Return how many parameters Muon steps on, if it is the optimizer, as a sentence."""
        if not self.matrices:
            return []
        stepped, in_all = sum(self.sizes[name] for name in self.matrices), sum(self.sizes.values())
        return [
            f"muon steps on {len(self.matrices)} matrices with {stepped:,} parameters, and adamw on the other "
            f"{in_all - stepped:,} parameters (docs/optimizers.md)"
        ]


def _layer_factors(decay: float | None, model: nn.Module, blocks: Collection[str]) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter under `optim.layer_decay`, as BEiT (arXiv:2106.08254) and timm.

    Parameters before the first block are layer 0, those of block i of n, and up to the next block, layer i, and those after the
    last block layer n + 1, which has the factor 1. Their order is that of the model's modules.
    """
    if decay is None:
        return {}
    inside: set[nn.Module] = set()
    found: dict[str, tuple[int, bool]] = {}  # blocks so far, and whether the parameter is in one
    count = 0
    for prefix, module in model.named_modules():
        if module not in inside and type(module).__name__ in blocks:
            inside.update(module.modules())
            count += 1
        for name, _ in module.named_parameters(prefix, recurse=False):
            found[name] = (count, module in inside)
    if not count:
        raise RecipeError(
            f"optim.layer_decay is {decay}, but the model, a {type(model).__name__}, names no blocks: leave it out, "
            'or give the classes of its layers in the task, as in blocks = ("Layer",)'
        )
    return {name: decay ** (count + 1 - it if is_in or it < count else 0) for name, (it, is_in) in found.items()}


def notes_on(recipe: OptimRecipe, rule: Rule) -> list[str]:
    """Return which parameters have the lowest and the highest rate under `optim.layer_decay`, as a note for the user."""
    if recipe.layer_decay is None:
        return []
    factors = rule.lr_factors
    ends = {end: [name for name in factors if factors[name] == end] for end in (min(factors.values()), max(factors.values()))}
    parts = [f"by {end:.3g} for {listed(names, 3)}" for end, names in ends.items()]
    return [f"optim.layer_decay is {recipe.layer_decay}: the learning rate is multiplied {', '.join(parts)}"]


def _chosen(recipe: OptimRecipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer, and its arguments without weight_decay and those at torch's default."""
    if optimizers.is_foreign(recipe.name):
        kind = foreign.imported(recipe.name)
        return kind, foreign.arguments(kind, recipe)
    found = optimizers.TABLE[recipe.name]
    of_recipe = {key: getattr(recipe, key) for key in ("lr", *found.keys)}
    kind = Muon if recipe.name == "muon" else getattr(torch.optim, found.torch_name)
    return kind, {**of_recipe, **(recipe.settings or {})}


def made(kind: type[torch.optim.Optimizer], groups: list[Any], chosen: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of the class with these parameter groups, to train with. Raises RecipeError with its own words."""
    try:
        optimizer: Any = kind(groups, **chosen)
        if foreign.has_modes(optimizer):
            optimizer.train()
            optimizer.state.clear()  # an empty state would keep the memory of a parameter that is sharded later
    except Exception as error:  # whatever the class raises
        raise RecipeError(
            f"{kind.__module__.split('.')[0]}'s {kind.__name__} refuses the settings of optim: {error}"
        ) from error
    return optimizer  # type: ignore[no-any-return]


def build_optimizer(
    recipe: OptimRecipe, model: nn.Module, rule: Rule | None = None, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the model's trainable parameters: in two groups, with and without weight decay, if there is any,
    and as many for each learning rate.

    `rule` is the model's; without, its parameters are not sharded yet, as `Rule.of` wants it. `fused`, for Adam and
    AdamW: None is where supported. The learning rate is the recipe's until `set_learning_rate` sets a step's.
    """
    rule = rule or Rule.of(recipe, model)
    alike: dict[tuple[float, float, bool], list[nn.Parameter]] = {
        (1.0, recipe.weight_decay, False): [],
        (1.0, 0.0, False): [],
    }
    for name, decay in rule.weight_decays.items():
        alike.setdefault((rule.lr_factors[name], decay, name in rule.matrices), []).append(model.get_parameter(name))
    # A group costs a call of the fused kernel.
    groups = [
        {"params": parameters, "lr": recipe.lr * factor, "lr_factor": factor, "weight_decay": decay}
        | ({"matrices": True} if is_matrix else {})
        for (factor, decay, is_matrix), parameters in alike.items()
        if parameters
    ]
    kind, chosen = _chosen(recipe)
    if kind in (torch.optim.Adam, torch.optim.AdamW, Muon):
        devices = {parameter.device.type for parameters in alike.values() for parameter in parameters}
        chosen["fused"] = devices <= FUSED_DEVICES if fused is None else fused
    return made(kind, groups, chosen)


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to the matrices and kernels that inputs are multiplied with.

    Not to biases and norms (one dimension; Goyal et al. 2017, section 5.1), and not to what only looks like a matrix: class
    tokens, position embeddings and tables of relative positions, which are added, and the layer scales of ConvNeXt and logit
    scales of Swin v2, which are factors of single channels or heads. torch and torchvision call none of these `weight`, and
    every matrix `weight` or `in_proj_weight`. (Swin, arXiv:2103.14030, exempts its tables too; timm's models these all.)
    transformers stacks the matrices of experts without calling them so; their biases, stacked, have two dimensions.
    """
    assert parameter.numel() > 0, f"{name} is empty: the optimizer was built after the model was sharded"
    return parameter.ndim >= 2 and (name.endswith("weight") or (parameter.ndim == 3 and ".experts." in name))


def by_muon(model: nn.Module, blocks: Collection[str]) -> frozenset[str]:
    """Return the names of the trainable parameters that Muon steps on: matrices and convolution kernels inside blocks.

    `blocks` are the classes of blocks. In a model without blocks these are all but the first and the last. Embeddings are none,
    nor are tensors of more dimensions that are no kernels, such as stacked experts.
    """
    modules = list(model.modules())
    weights = [it for name, it in model.named_parameters(remove_duplicate=False) if decays(name, it)]
    within = [it for it in modules if type(it).__name__ in blocks]
    inside = {id(it) for it in (chain.from_iterable(block.parameters() for block in within) if within else weights[1:-1])}
    inside -= {id(it) for module in modules if isinstance(module, nn.Embedding) for it in module.parameters()}
    kernels = {id(module.weight) for module in modules if isinstance(module, _ConvNd)}
    return frozenset(
        name
        for name, it in model.named_parameters()
        if it.requires_grad and id(it) in inside and decays(name, it) and (it.ndim == 2 or id(it) in kernels)
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each parameter group the learning rate `lr`, times its factor if it has one."""
    for group in optimizer.param_groups:
        set_rate(group, lr * group.get("lr_factor", 1.0))


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Give a parameter group this learning rate; torchao's optimizers want theirs to stay the same tensor."""
    group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr


@torch.optim.Optimizer.profile_hook_step
@torch.no_grad()
def fused_sgd_step(optimizer: Any) -> None:
    """Take the step of torch's SGD by its fused kernel, unless `optimizer.found_inf` (a float32 scalar on the device) is 1.

    SGD(fused=True) would refuse FSDP2's tensors (torch 2.15: "does not have a sharding strategy registered"), which are stepped
    on here piece by piece. And if it skipped its first step it would leave the momentum as the memory was (torch/optim/sgd.py,
    `empty_like`). Here the momentum begins with zeros, and the first step then has the bits that it has without: there is no
    dampening. On a CPU the kernel rounds otherwise than torch's default, in the last elements of a tensor.
    """
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        momenta: list[torch.Tensor | None] = [None] * len(parameters)
        if group["momentum"]:
            for parameter in parameters:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momenta = [local(optimizer.state[parameter]["momentum_buffer"]) for parameter in parameters]
        sgd(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],
            momenta,
            fused=True,
            found_inf=optimizer.found_inf,
            **{name: group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")},
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let no parameter be trained whose name matches one of the patterns, such as `features.*`.

    Raises RecipeError for a pattern that matches none, and if nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise RecipeError(f"train.freeze has {pattern!r}, which matches no parameter: {near(pattern, list(parameters))}")
        for parameter in matched:
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError(
            f"all {len(parameters)} parameters of the model, a {type(model).__name__}, are frozen (train.freeze is "
            f"{', '.join(patterns) or 'empty'}), so there is nothing to train"
        )
    set_training(model, mode=model.training)


def near(pattern: str, names: Sequence[str]) -> str:
    """Return, for a pattern that matches none of the names, the nearest pattern that does, and some of the names."""
    layers = (".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1))
    known = [*dict.fromkeys(f"{layer}.*" for layer in layers), *names]
    return did_you_mean(pattern, known, then=f"There are {listed(names)}")


def set_training(model: nn.Module, *, mode: bool) -> None:
    """Put a model, prepared or not, into training or evaluation mode, but for layers that keep their statistics."""
    model.train(mode)
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, _NormBase) and own and not any(parameter.requires_grad for parameter in own):
            layer.eval()
