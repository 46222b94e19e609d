"""Backward passes and optimizer steps, of which one is left out, on every rank, when its gradient is not finite or a spike.

The ranks need not ask one another. Whatever one of them met is in the gradient that they share: DDP's is averaged, and the
norm of FSDP2's and DeepSpeed's is taken over all shards. On a GPU nothing waits for the verdict: torch's fused optimizers take
it as a tensor (`found_inf`, as torch.amp.GradScaler hands it to them).

Accelerate's own calls are made where they do more than torch's: with a gradient scaler. Elsewhere they cost 150-200 us a step
on two cores (two searches of sys.path, an inspected signature, a division by 1). DeepSpeed's engine is called by what it has
for both, backward passes and steps: Accelerate would take the step within the last backward pass.

What torch wraps around every optimizer's step, hooks and a name for its profiler, costs another 35 us. It is left out in a step
for which there is none of either: no hook of this optimizer, none of all optimizers, no profiler that records.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from app.spikes import SpikeGuard, leave_out


@dataclass(frozen=True)
class Step:
    """What became of a step."""

    grad_norm: torch.Tensor | float
    """Norm of the whole gradient, before clipping; a tensor is a scalar on the device."""
    skipped: torch.Tensor | bool
    """Whether it was left out; a tensor is a bool scalar on the device."""


class Steps:
    """Takes the steps of a prepared optimizer."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        clip_norm: float | None,
        spikes: SpikeGuard | None = None,
        before_backward: Callable[[], None] | None = None,
    ) -> None:
        """`model` and `optimizer` are as `prepare` returned them; `clip_norm` is the largest norm a gradient may have.

        `spikes` tells which norm is a spike; None: none is. `before_backward` is called where a backward pass begins.
        """
        self._accelerator, self._model, self._optimizer, self._clip_norm = accelerator, model, optimizer, clip_norm
        self._before_backward, self._spikes = before_backward, spikes or SpikeGuard(None)
        self._last_norm: torch.Tensor | float = math.nan
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)  # there is none but under DeepSpeed
        self._engine: Any = wrapped and wrapped.engine
        self._accumulation = accelerator.gradient_accumulation_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own = optimizer.optimizer
        self._torch_optimizer = own if isinstance(own, torch.optim.Optimizer) and accelerator.scaler is None else None
        self._bare_step: Any = self._torch_optimizer and inspect.unwrap(type(own).step)
        self._pass_gradient: torch.Tensor | None = None
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        takes_verdict = self._torch_optimizer is not None and all(group.get("fused") for group in own.param_groups)
        # On the CPU looking costs less than the fused kernels' reading of a tensor.
        self._leaves_verdict = takes_verdict and not self._is_sharded and accelerator.device.type != "cpu"
        if self._engine is not None:
            leave_out(own.optimizer, functools.partial(self._is_spike_in_zero, own))
        elif self._torch_optimizer is None:
            leave_out(own, lambda: not self._last_norm < self._spikes.limit)

    def micro_batch(self) -> AbstractContextManager[None]:
        """Return the block of one forward and backward pass: in all but a step's last, ranks keep their gradients."""
        return nullcontext() if self._accumulation == 1 else self._accelerator.accumulate(self._model)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, a scalar, to that of the step, which is the mean over its passes."""
        if self._before_backward is not None:
            self._before_backward()
        if self._engine is not None:
            self._engine.set_gradient_accumulation_boundary(is_boundary=self._accelerator.sync_gradients)
            self._engine.backward(loss)
            return
        if self._torch_optimizer is None:
            self._accelerator.backward(loss)
            return
        if self._pass_gradient is None:  # that of the step's loss for this one, kept: torch would make another each time
            self._pass_gradient = torch.full_like(loss.detach(), 1 / self._accumulation)
        loss.backward(self._pass_gradient)

    def take(self) -> Step:
        """Clip the gradient, take the step if it may be, and forget it. Called by all ranks after the last backward pass.

        It may be if the gradient is finite and no spike.
        """
        if self._engine is not None:
            self._engine.step()  # clips, leaves out what is not finite, and forgets the gradient
            step = self._known(self._engine.get_global_grad_norm())
        elif self._torch_optimizer is None:
            self._last_norm = float(self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm or float("inf")))
            self._optimizer.step()
            self._optimizer.zero_grad()
            step = self._known(self._last_norm)
        else:
            step = self._take_unless_spoilt(self._torch_optimizer)
            for parameter in self._parameters:
                parameter.grad = None
        self._last_norm = step.grad_norm
        self._spikes.see(step.grad_norm, skipped=step.skipped)
        return step

    @property
    def verdict(self) -> str:
        """The norm of the last step's gradient, and what it was held against, in words."""
        norm, limit = float(self._last_norm), float(self._spikes.limit)
        return f"its gradient norm is {norm:.3g}" + (f", and a spike from {limit:.3g} on" if math.isfinite(limit) else "")

    def _known(self, norm: float) -> Step:
        """What became of a step that others took, whose norm they tell."""
        is_left_out = not norm < self._spikes.limit
        return Step(float(norm), is_left_out or bool(self._optimizer.step_was_skipped))

    def _is_spike_in_zero(self, zero: Any) -> bool:
        """Whether DeepSpeed's optimizer `zero` is about to step on a spike.

        It has no public way to leave out a step. Here alone its own attribute is read: each of its steps keeps the norm there
        before it calls torch's (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py), and its engine tells it later.
        """
        return not zero._global_grad_norm < self._spikes.limit

    def _take_unless_spoilt(self, optimizer: torch.optim.Optimizer) -> Step:
        norms = self._norms_and_clip()
        if self._leaves_verdict:
            norm = torch.linalg.vector_norm(torch.stack(norms))
            is_left_out = ~(norm < self._spikes.limit)
            optimizer.found_inf = is_left_out.float()  # type: ignore[attr-defined]
            self._step(optimizer)
            return Step(norm, is_left_out)
        known_norm = math.hypot(*(norm.item() for norm in norms))
        if known_norm < self._spikes.limit:
            self._step(optimizer)
            return Step(known_norm, False)
        return Step(known_norm, True)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if _is_watched(optimizer):
            optimizer.step()
            return
        with torch.no_grad():
            self._bare_step(optimizer)

    def _norms_and_clip(self) -> list[torch.Tensor]:
        """Return scalars whose norm is that of the gradient before clipping: the whole one's, or those of its tensors."""
        if self._clip_norm is not None or self._is_sharded:
            norm: Any = self._accelerator.clip_grad_norm_(self._parameters, self._clip_norm or float("inf"))
            return [norm.full_tensor() if isinstance(norm, DTensor) else norm]
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return list(torch._foreach_norm(gradients))


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to know of its steps: by a hook, by a profiler, or by a `step` in the place of its own."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or profiler._is_profiler_enabled
        or "step" in vars(optimizer)
    )
