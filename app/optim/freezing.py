"""Frozen parameters: by the recipe's `train.freeze`, or because the task's model sets requires_grad=False.

A normalization layer all of whose own parameters are frozen keeps its running statistics too, and normalizes by them while it
trains, as in an evaluation: otherwise it would go on changing, and by statistics of micro-batches, which depend on how many
processes there are. Dropout in frozen layers stays on.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from app.errors import RecipeError

_MOST_NAMED = 8


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
        by = (
            f"train.freeze is {', '.join(patterns)}"
            if patterns
            else f"the model, {type(model).__name__}, freezes its own parameters"
        )
        raise RecipeError(f"{by}: all {len(parameters)} parameters are frozen, so there is nothing to train")
    set_training(model, mode=model.training)


def near(pattern: str, names: Sequence[str]) -> str:
    """Return what a pattern may have meant that matches none of the names."""
    layers = (".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1))
    close = difflib.get_close_matches(pattern, [*dict.fromkeys(f"{layer}.*" for layer in layers), *names], n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{hint}There are {', '.join(names[:_MOST_NAMED])}{more}"


def set_training(model: nn.Module, *, mode: bool) -> None:
    """Put a model, prepared or not, into training or evaluation mode, but for layers that keep their statistics."""
    model.train(mode)
    for layer in model.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, _NormBase) and own and not any(parameter.requires_grad for parameter in own):
            layer.eval()
