"""The networks, and the loss on their outputs. Knows no device and no rank.

`build` gives the small `convnet` or any classification model of torchvision or timm, with new weights that depend on torch's
seed alone. All are what the libraries build under these names, so that their weights load without this package.

Shapes: B samples in a micro-batch, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

from app.distributed.numerics import HALF
from app.errors import RecipeError
from app.tasks.image_classification import timm_models
from app.tasks.image_classification.sections import CONVNET, TIMM, ModelRecipe, model_name_problem, torchvision_arguments

_MAX_GROUPS = 8
_BLOCKS = {
    "vit_": "EncoderBlock",
    "swin_v2_": "SwinTransformerBlockV2",
    "swin_": "SwinTransformerBlock",
    "convnext_": "CNBlock",
}
"""The class of the repeated layers of torchvision's networks, by how their names begin; others are stages of unlike layers."""


def build(recipe: ModelRecipe, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Return the network on the CPU, in training mode, for images [B, C=channels, H, W] with (H, W) = image_size.

    Its output is [B, K=num_classes]. The weights are drawn from torch's global generator, in float32. Raises RecipeError if the
    name is unknown, or the network does not take images of this size.
    """
    make = _convnet if recipe.name == CONVNET else _timm_model if recipe.name.startswith(TIMM) else _torchvision_model
    model = make(recipe, channels=channels, image_size=image_size, num_classes=num_classes)
    _check_shapes(recipe.name, model, channels=channels, image_size=image_size, num_classes=num_classes)
    return model


def block_class(name: str) -> str | None:
    """Return the name of the class of a network's repeated layers, if it has any."""
    return next((block for prefix, block in _BLOCKS.items() if name.startswith(prefix)), None)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float) -> torch.Tensor:
    """Return the mean of the samples' cross-entropies, a scalar tensor in nats, computed in float32 at least.

    `logits` are [B, K]; `targets` are class indices [B] int64, or probabilities [B, K]. `label_smoothing` is the share of each
    target that is spread evenly over all classes, 0..1.
    """
    if logits.dtype in HALF.values():
        logits = logits.float()
    if targets.is_floating_point():
        targets = targets.to(logits.dtype)
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def _convnet(recipe: ModelRecipe, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Two convolutions, each followed by halving the image, and two linear layers.

    The activation comes after the pooling: for ReLU and maxima the order makes no difference, but there is a quarter of the
    values left (a sixth of a step saved).
    """
    height, width = image_size
    if min(image_size) < 4:
        raise RecipeError(f"model.name is convnet, which needs images of at least 4x4 pixels; these have {height}x{width}")
    first, second = recipe.channels
    pool = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}[recipe.pooling]
    activation = {"relu": nn.ReLU, "gelu": nn.GELU}[recipe.activation]
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, first, kernel_size=3, padding=1),
            norm1=_norm(recipe.norm, first),
            pool1=pool(2),
            act1=activation(),
            conv2=nn.Conv2d(first, second, kernel_size=3, padding=1),
            norm2=_norm(recipe.norm, second),
            pool2=pool(2),
            act2=activation(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(second * (height // 4) * (width // 4), recipe.hidden),
            act3=activation(),
            head=nn.Linear(recipe.hidden, num_classes),
        )
    )


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "identity":
        return nn.Identity()
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(groups for groups in range(1, _MAX_GROUPS + 1) if channels % groups == 0), channels)


def _torchvision_model(recipe: ModelRecipe, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    # Imported here because it costs more than a second, which the convnet need not pay.
    import torchvision
    from torchvision import models as zoo

    name = recipe.name
    if name not in zoo.list_models(module=zoo):
        here = f"model.name is {name!r}: the installed torchvision {torchvision.__version__} has no such model"
        raise RecipeError(model_name_problem(name) or here)
    try:
        model: nn.Module = zoo.get_model(name, weights=None, num_classes=num_classes, **torchvision_arguments(name, image_size))
    except (AssertionError, ValueError) as error:  # how vit and maxvit refuse a size
        raise _unsuitable(name, channels, image_size, error) from error
    _adapt_first_convolution(model, channels)
    return model


def _timm_model(recipe: ModelRecipe, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    try:
        return timm_models.build(recipe.name, channels=channels, image_size=image_size, num_classes=num_classes)
    except (AssertionError, ValueError, RuntimeError, TypeError) as error:  # how timm's models refuse a size
        raise _unsuitable(recipe.name, channels, image_size, error) from error


def _adapt_first_convolution(model: nn.Module, channels: int) -> None:
    """Make the first layer take `channels` channels. In every classification model of torchvision it is a convolution."""
    name, old = next((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    if old.in_channels == channels:
        return
    new = nn.Conv2d(
        channels,
        old.out_channels,
        kernel_size=old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    with torch.no_grad():
        # The scale of the family's own initial weights, such that the layer's outputs keep their size.
        new.weight.normal_().mul_(old.weight.std() * math.sqrt(old.in_channels / channels))
    if old.bias is not None:
        new.bias = old.bias
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def _check_shapes(name: str, model: nn.Module, *, channels: int, image_size: tuple[int, int], num_classes: int) -> None:
    """Run the network on tensors without data (torch's meta device): costs no arithmetic, memory or random numbers."""
    tensors = {key: tensor.to("meta") for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    dtype = next(model.parameters()).dtype
    images = torch.empty(2, channels, *image_size, dtype=dtype, device="meta")
    model.eval()
    try:
        with torch.no_grad():
            logits = torch.func.functional_call(model, tensors, (images,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _unsuitable(name, channels, image_size, error) from error
    finally:
        model.train()
    assert logits.shape == (2, num_classes), f"{name} returned {logits.shape}"


def _unsuitable(name: str, channels: int, image_size: tuple[int, int], error: Exception) -> RecipeError:
    height, width = image_size
    return RecipeError(
        f"model.name is {name}, which does not take images of {height}x{width} pixels with {channels} channel(s) ({error}): "
        "set data.image_size (most models expect 224 or more), or choose another model.name"
    )
