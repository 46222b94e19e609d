"""Optimizer steps, of which one is left out, on every rank, when its gradient is not finite: weights are never spoilt.

The ranks need not ask one another. Whatever one of them met is in the gradient that they share: DDP's is averaged, the norm
of FSDP2's is taken over all shards, and DeepSpeed leaves out such steps by itself. On a GPU nothing waits for the verdict:
torch's fused optimizers take it as a tensor (`found_inf`, as torch.amp.GradScaler hands it to them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Step:
    """What became of a step."""

    grad_norm: torch.Tensor | float
    """Norm of the whole gradient, before clipping; a tensor is a scalar on the device."""
    skipped: torch.Tensor | bool
    """Whether it was left out; a tensor is a bool scalar on the device."""


class Steps:
    """Takes the steps of a prepared optimizer."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, *, clip_norm: float | None) -> None:
        """`model` and `optimizer` are as `prepare` returned them; `clip_norm` is the largest norm a gradient may have."""
        self._accelerator, self._optimizer, self._clip_norm = accelerator, optimizer, clip_norm
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own = optimizer.optimizer
        self._torch_optimizer = own if isinstance(own, torch.optim.Optimizer) and accelerator.scaler is None else None
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        takes_verdict = self._torch_optimizer is not None and all(group.get("fused") for group in own.param_groups)
        # On the CPU looking costs less than the fused kernels' reading of a tensor.
        self._leaves_verdict = takes_verdict and not self._is_sharded and accelerator.device.type != "cpu"

    def take(self) -> Step:
        """Clip the gradient and take the step, if the gradient is finite. Called by all ranks after the last backward pass."""
        if self._torch_optimizer is None:
            norm = self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm or float("inf"))
            self._optimizer.step()
            return Step(norm, bool(self._optimizer.step_was_skipped))
        norm = self._norm_and_clip()
        is_finite = torch.isfinite(norm)
        if self._leaves_verdict:
            self._torch_optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
            self._torch_optimizer.step()
            return Step(norm, ~is_finite)
        if is_finite:
            self._torch_optimizer.step()
        return Step(norm, not is_finite)

    def _norm_and_clip(self) -> torch.Tensor:
        if self._clip_norm is not None or self._is_sharded:
            norm: Any = self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm or float("inf"))
            whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
            return whole
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        of_all: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return of_all
