"""Numerics: precision of matrix products, and layers that give the same result on every device and split.

torch rounds the factors of float32 convolutions on NVIDIA GPUs to TF32, 10 bits of 23, unless a setting forbids it, and factors
of matrix products only if a setting asks for it, as Accelerate 1.15 does where a model is compiled without mixed precision.
Here both settings are the recipe's. CPUs compute float32 as IEEE has it.

torch 2.9 gave the settings new names, and reading one by its old name raises an error where the new ones say something else
(aten/src/ATen/Context.cpp, 2.9 to 2.15). torch's compiler reads them by both. So all are set, to the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from app.errors import RecipeError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")
"""With these cuBLAS gives the same bits in several streams too (docs.nvidia.com/cuda/cublas, results reproducibility).
Older torch refuses products without one; 2.11 and 2.15 do not."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Numerics of this process's device."""

    tf32: bool
    """True if the factors of products in float32 are rounded to TF32, on GPUs that have it."""
    deterministic: bool
    """True if only deterministic kernels are used; operations that have none are refused."""

    def __str__(self) -> str:
        products = f"float32 products in {'TF32' if self.tf32 else 'IEEE float32'}"
        return f"{products}, deterministic kernels only" if self.deterministic else products


def set_up(device: torch.device, *, tf32: bool, deterministic: bool) -> Numerics:
    """Have torch compute so on this device; return how it does. Comes before anything computes.

    Raises RecipeError if the environment has cuBLAS compute otherwise.
    """
    found = Numerics(tf32=tf32 and device.type == "cuda", deterministic=deterministic)
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]  # what is not set follows it, on GPUs the next
    torch.backends.cudnn.fp32_precision = "tf32" if found.tf32 else "ieee"
    torch.set_float32_matmul_precision("highest")  # of CPUs as well
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = found.tf32
    # Never timed and chosen: what is fastest in that moment may be another kernel on another rank, and in the next start, and
    # rounds otherwise; and each new shape, such as an evaluation's last batch, would be timed anew (benchmarks/RESULTS.md).
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic
    if deterministic and device.type == "cuda":
        workspace = os.environ.setdefault(_WORKSPACE, _FIXED_WORKSPACES[0])  # cuBLAS reads it when it first computes
        if workspace not in _FIXED_WORKSPACES:
            raise RecipeError(
                f"train.deterministic is true, and {_WORKSPACE} is {workspace!r} in the environment, which allows "
                f"cuBLAS to give other bits each time: unset it, or set it to {' or '.join(_FIXED_WORKSPACES)}"
            )
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler: a second
        torch.use_deterministic_algorithms(deterministic)
    return found


def rounds_to_tf32(device: torch.device) -> bool:
    """Return whether float32 factors may be rounded there: on GPUs as it was set up; of others than CPUs nothing is known."""
    if device.type == "cuda":
        return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
    return device.type != "cpu"


def on_tensor_cores(device: torch.device, *, mixed_precision: str) -> bool:
    """Return whether products are left to a GPU's tensor cores; IEEE's float32 has none."""
    return device.type == "cuda" and (mixed_precision != "no" or rounds_to_tf32(device))


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise RecipeError where torch refuses an operation that has no deterministic kernel."""
    try:
        yield
    except RuntimeError as error:
        refused = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if refused is None:
            raise
        raise RecipeError(
            f"train.deterministic is true, and torch {torch.__version__} has no deterministic kernel for "
            f"{refused[1]}: choose another model, or train.deterministic=false"
        ) from error


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the precisions below float32, by Accelerate's words."""


class _CastInOrder(nn.Conv2d):
    """A convolution that puts half-precision kernels into channels_last order.

    Under autocast that is part of the copy that it takes anyway. Kernels that were half-precision before are ordered on a CPU
    alone: on a GPU cuDNN orders them where it needs them, and a copy kept for the backward pass would undo their sharding.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name for it)
        """Return the convolved images [B, C, H, W]."""
        weight, device = self.weight, input.device.type
        is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if is_cast and weight.dtype == torch.float32:
            weight = weight.to(torch.get_autocast_dtype(device), memory_format=torch.channels_last)
        elif device == "cpu" and weight.dtype in HALF.values():
            weight = weight.contiguous(memory_format=torch.channels_last)
        convolved: torch.Tensor = self._conv_forward(input, weight, self.bias)
        return convolved


def take_channels_last(model: nn.Module) -> None:
    """Prepare a model for images in channels_last order.

    Its kernels stay as they are, since checkpoints and shards are ranges of them, and float32 kernels in that order are slower
    on a CPU. Half-precision ones take a quarter of the time in it (benchmarks/RESULTS.md), and are ordered where they are made.
    """
    replace(model, lambda layer, _: _as(_CastInOrder, layer) if type(layer) is nn.Conv2d else None)


def order_small_kernels(model: nn.Module) -> None:
    """Give kernels of one input channel or one pixel, which are in both memory orders, the strides of channels_last.

    Their gradients have those for images in that order, and DDP warns of gradients with other strides than the weights'.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4 and (parameter.shape[1] == 1 or parameter.shape[2:] == (1, 1)):
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


class _NormInFloat(nn.BatchNorm2d):
    """A batch normalization whose weights may be in half precision, as DeepSpeed and FSDP2 cast them: its statistics never are.

    GPUs take the two together; a CPU "expected scalar type BFloat16 but found Float" (torch 2.15).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name for it)
        """Return the normalized images [B, C, H, W], in their type."""
        weight, bias, momentum = self.weight.float(), self.bias.float(), self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(input, mean, variance, weight, bias, self.training, momentum or 0.0, self.eps)


def normalize_in_float(model: nn.Module) -> None:
    """Prepare a model for weights that are cast to half precision, on a CPU."""
    replace(model, lambda layer, _: _as(_NormInFloat, layer) if type(layer) is nn.BatchNorm2d else None)


def _as(kind: type[nn.Module], layer: nn.Module) -> nn.Module:
    """Return a layer of a subclass with the settings, parameters and buffers of `layer`, the same tensors."""
    own = kind.__new__(kind)
    own.__dict__.update(layer.__dict__)
    return own


def replace(model: nn.Module, own: Callable[[nn.Module, str], nn.Module | None]) -> None:
    """Replace each layer by the result of `own` for it and its name; None: the layer stays.

    A layer in several places remains one layer, and has the first of its names.
    """
    made: dict[nn.Module, nn.Module | None] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if layer not in made:
            made[layer] = own(layer, path)
        parent, _, name = path.rpartition(".")
        if (found := made[layer]) is not None:
            setattr(model.get_submodule(parent), name, found.train(layer.training))


def layer_in(frames: Iterable[FrameType], model: Any) -> tuple[str, nn.Module] | None:
    """Return name and module of the innermost layer of the model that these frames call, the last call first."""
    names = {layer: name for name, layer in model.named_modules()} if isinstance(model, nn.Module) else {}
    callers = (frame.f_locals.get("self") for frame in frames)
    return next(((names[it], it) for it in callers if isinstance(it, nn.Module) and it in names), None)


def without_data(model: nn.Module) -> Callable[..., Any]:
    """Return the model as a function of tensors of torch's meta device: calls cost no arithmetic, memory or random numbers.

    A tensor in several places is one there too. Each place of each module is named once: torch puts back what it found at a
    name, and at the second name of a module it would find what it has put there itself.
    """
    made: dict[int, torch.Tensor] = {}

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        return made.setdefault(id(tensor), tensor.detach().to("meta").requires_grad_(tensor.requires_grad))

    tensors = {
        f"{path}.{key}" if path else key: bare(tensor)
        for path, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    return lambda *inputs, **named: torch.func.functional_call(model, tensors, inputs, named, tie_weights=False)
