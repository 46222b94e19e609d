"""Layers that make a run depend on its topology: batch statistics. (For random layers see `sample_dropout`.)"""

from __future__ import annotations

from torch import nn

from app.errors import RecipeError


def synchronize_batchnorm(model: nn.Module, *, device_type: str) -> nn.Module:
    """Return the model with batch statistics taken over all processes.

    Raises RecipeError if it takes none, and on CPU, where torch has no such layer.
    """
    if not batchnorms(model):
        raise RecipeError(
            f"train.sync_batchnorm is true, but the model, {type(model).__name__}, has no batch normalization: remove it"
        )
    if device_type == "cpu":
        raise RecipeError(
            "train.sync_batchnorm is true, but the run is on CPU, where torch has no synchronized batch normalization: "
            "set train.sync_batchnorm=false, choose a model without batch normalization, or run on GPUs"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def topology_dependence(model: nn.Module) -> list[str]:
    """Return a sentence for each kind of layer through which the same recipe can give another result on other processes."""
    sentences = []
    # One that is frozen is not in training mode: it keeps its statistics.
    using_batches = {name: layer for name, layer in batchnorms(model).items() if layer.training}
    unsynchronized = [name for name, layer in using_batches.items() if not isinstance(layer, nn.SyncBatchNorm)]
    if unsynchronized:
        sentences.append(
            f"{_counted(unsynchronized, 'batch normalization layer')}: statistics are computed per "
            "micro-batch, so results depend on the number of processes (on GPUs, train.sync_batchnorm=true "
            "computes them over all processes)"
        )
    return sentences


def batchnorms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the model's batch normalizations by their names."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}


def _counted(names: list[str], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({names[0]}{', ...' if len(names) > 1 else ''})"
