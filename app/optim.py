"""The optimizer of a recipe: plain torch, with weight decay where it belongs and fused kernels where torch has them."""

from __future__ import annotations

import torch
from torch import nn

from app.recipe import OptimRecipe

# Kinds of device on which torch (2.8 and later) has a fused AdamW: one pass over the weights instead of several. Its fused SGD
# refuses FSDP2's tensors (torch 2.15) and saves little, since a step of SGD is short.
_FUSED_DEVICES = {"cpu", "cuda"}


def build(recipe: OptimRecipe, model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer of the model's trainable parameters: in two groups, with and without weight decay, if there is any.

    Call it before the parameters are sharded: the groups follow from names and shapes. `fused`, for AdamW alone:
    None is where supported.
    The learning rate is the recipe's until `set_learning_rate` sets that of a step.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        decayed[recipe.weight_decay > 0 and decays(name, parameter)].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": recipe.weight_decay if decay else 0.0}
        for decay, parameters in decayed.items()
        if parameters  # a group costs a call of the fused kernel
    ]
    if recipe.name == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    if fused is None:
        fused = all(parameter.device.type in _FUSED_DEVICES for _, parameter in named)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to the matrices and kernels that inputs are multiplied with.

    Not to biases and norms (one dimension; Goyal et al. 2017, section 5.1), and not to what only looks like a matrix: class
    tokens, position embeddings and tables of relative positions, which are added, and the layer scales of ConvNeXt and logit
    scales of Swin v2, which are factors of single channels or heads. torch and torchvision call none of these `weight`, and
    every matrix `weight` or `in_proj_weight`. (Swin, arXiv:2103.14030, exempts its tables too; timm's models these all.)
    """
    assert parameter.numel() > 0, f"{name} is empty: the optimizer was built after the model was sharded"
    return parameter.ndim >= 2 and name.endswith("weight")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all parameter groups the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
