"""How a device computes: whether float32 is rounded to TF32, and whether kernels are deterministic.

torch rounds the factors of float32 convolutions on NVIDIA GPUs to TF32, 10 bits of 23, unless a setting forbids it, and factors
of matrix products only if a setting asks for it, as Accelerate 1.15 does where a model is compiled without mixed precision.
Here both settings are the recipe's. CPUs compute float32 as IEEE has it.

torch 2.9 gave the settings new names, and reading one by its old name raises an error where the new ones say something else
(aten/src/ATen/Context.cpp, 2.9 to 2.15). torch's compiler reads them by both. So all are set, to the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from app.errors import RecipeError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")
"""With these cuBLAS gives the same bits in several streams too (docs.nvidia.com/cuda/cublas, results reproducibility).
Older torch refuses products without one; 2.11 and 2.15 do not."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How this process's device computes."""

    tf32: bool
    """Whether the factors of products in float32 are rounded to TF32, on GPUs that have it."""
    deterministic: bool
    """Whether only kernels are used that give the same bits each time; operations that have none are refused."""

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
    # rounds otherwise; and each new shape, such as an evaluation's last batch, would be timed anew (docs/performance-gpu.md).
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
