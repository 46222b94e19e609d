"""Layers through which a run depends on its topology: batch statistics, and what is drawn at random in forward passes."""

from __future__ import annotations

from torch import nn

from app.errors import RecipeError


def synchronize_batchnorm(model: nn.Module, *, device_type: str) -> nn.Module:
    """Return the model with batch statistics taken over all processes.

    Raises RecipeError if it takes none, and on CPU, where torch has no such layer.
    """
    if not _batchnorms(model):
        raise RecipeError(
            f"train.sync_batchnorm is true, but the model, {type(model).__name__}, has no batch normalisation: remove it"
        )
    if device_type == "cpu":
        raise RecipeError(
            "train.sync_batchnorm is true, but the run is on CPU, where torch has no synchronised batch normalisation: "
            "set train.sync_batchnorm=false, choose a model without batch normalisation, or run on GPUs"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def topology_dependence(model: nn.Module) -> list[str]:
    """Return a sentence for each kind of layer through which the same recipe can give another result on other processes."""
    sentences = []
    # One that is frozen is not in training mode: it keeps its statistics.
    using_batches = {name: layer for name, layer in _batchnorms(model).items() if layer.training}
    unsynchronized = [name for name, layer in using_batches.items() if not isinstance(layer, nn.SyncBatchNorm)]
    if unsynchronized:
        sentences.append(
            f"{_counted(unsynchronized, 'batch normalisation layer')}: their statistics are those of one micro-batch, so "
            "results depend on the number of processes (on GPUs, train.sync_batchnorm=true takes them over all processes)"
        )
    if random := layers_with_dropout(model):
        sentences.append(
            f"{_counted(random, 'layer')} with dropout: each process draws its own, so results depend on their number"
        )
    return sentences


def layers_with_dropout(model: nn.Module) -> list[str]:
    """Return the names of the layers that draw at random while training."""
    return [name for name, layer in model.named_modules() if _dropout_rate(layer) > 0]


def _batchnorms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}


def _dropout_rate(layer: nn.Module) -> float:
    """Return the share of its input that the layer drops at random while training."""
    rate: float = 0.0
    if isinstance(layer, nn.MultiheadAttention):
        rate = layer.dropout
    elif isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth":
        rate = vars(layer)["p"]  # torchvision's class is told by its name: its import is slow, see `_torchvision_model`
    return rate


def _counted(names: list[str], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({names[0]}{', ...' if len(names) > 1 else ''})"
