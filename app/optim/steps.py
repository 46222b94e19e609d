"""Backward passes and optimizer steps. A step whose gradient is not finite or is a spike is skipped on every rank.

The ranks need not ask one another. Whatever one of them met is in the gradient that they share: DDP's is averaged, and the
norm of FSDP2's and DeepSpeed's is taken over all shards. On a GPU nothing waits for the verdict: torch's fused kernels take
it as a tensor (`found_inf`, as torch.amp.GradScaler hands it to them).

The optimizer's own step is called, not Accelerate's: with a gradient scaler that does not report a step that a fused optimizer
skipped (accelerate 1.15, optimizer.py), and it searches sys.path for other optimizers in each step. Here a scaler unscales the
gradient, sees what is not finite in it, and chooses its next scale. DeepSpeed's engine is called for backward passes and steps:
Accelerate would take the step within the last backward pass.

Spikes: one broken batch, flipped bit or wrong kernel can give a finite gradient with a norm of 1e18 between norms of 26, and
one step on it ruins the run. OLMo-core's SkipStepOptimizer leaves out steps more than six standard deviations above the mean of
the last 128, once it knows 64 (github.com/allenai/OLMo-core, src/olmo_core/optim). Here a norm is a spike if it is N times
the median of the last 128 that were stepped on, which one outlier does not move.

Late in a long training norms shrink to a ten-thousandth, and Adam at a constant rate meets steps at which they grow back within
two, to 220,000 times the median (measured: `digits` without decay of the rate, 12,000 steps), from which it recovers. So the
first median of a run counts too, where it is the greater one.

The verdict follows from the run's own history, so a resumed run comes to the same ones. All ranks have the same norm, other
topologies to rounding (3e-7).

A parameter that gets no gradient is never trained, and strategies treat it differently: under DDP the next forward pass fails,
FSDP2 and ZeRO say nothing. ZeRO takes gradients away as they come, so hooks see them. FSDP2 computes with other tensors than
its parameters, which have their gradients when the passes are over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from app.environment.topology import listed
from app.errors import TrainingError
from app.optim import parameter_groups

_LARGE, _ROW = 1 << 16, 1 << 14
"""Elements of a tensor whose norm is taken by rows, and of such a row."""


class Step(NamedTuple):
    """The outcome of a step."""

    grad_norm: torch.Tensor | float
    """Norm of the whole gradient, before clipping; a tensor is a scalar on the device."""
    skipped: torch.Tensor | bool
    """True if it was skipped; a tensor is a float32 scalar on the device, 1 or 0, as torch's fused kernels expect it."""
    learning_rate: float
    by_recipe: bool = False
    """True if `train.skip_steps` has it: nothing was computed, and the norm is NaN."""


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
        before_first: Callable[[], None] | None = None,
        lap: Callable[[Literal["forward_backward", "optimizer"]], None] = lambda _: None,
        looks: bool | None = None,
    ) -> None:
        """`model` and `optimizer` are as `prepare` returned them; `clip_norm` is the largest norm a gradient may have.

        `spikes` decides which norm is a spike; None: none is. `before_backward` is called before each backward pass,
        `before_first` once before the first step, and `lap` at the end of each phase of a step. With `looks` the host waits for
        the norm of a gradient before its step. None: on a CPU, where that costs less than the fused kernels' reading of a
        tensor, and wherever the kernels cannot decide.
        """
        self._accelerator, self._model, self._clip_norm = accelerator, model, clip_norm
        self.optimizer = optimizer
        """The optimizer as returned by `prepare`."""
        self._before_backward, self._spikes, self._lap = before_backward, spikes or SpikeGuard(None), lap
        self._before_first = before_first
        self._last_norm: torch.Tensor | float = math.nan
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)  # only under DeepSpeed
        self._engine: Any = wrapped and wrapped.engine
        self._scaler: torch.amp.GradScaler | None = accelerator.scaler
        self._accumulation = accelerator.gradient_accumulation_steps
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        self._by_copies: dict[int, list[torch.nn.Parameter]] = {}
        """Parameters by the number of ranks that hold the same elements; 1 where each rank has the whole norm itself."""
        for parameter in self._parameters:
            copies = 1
            if self._is_sharded:
                assert isinstance(parameter, DTensor)
                sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                copies = accelerator.num_processes // math.prod(size for size, how in sizes if not how.is_replicate())
            self._by_copies.setdefault(copies, []).append(parameter)
        self._own: Any = optimizer.optimizer
        """DeepSpeed's optimizer, or torch's."""
        if self._engine is not None:
            # DeepSpeed has no public way to skip a step. Each of its steps keeps the norm in this private attribute before it
            # calls torch's (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py).
            leave_out(self._own.optimizer, lambda: not self._own._global_grad_norm < self._spikes.limit)
            return
        kind = accelerator.device.type
        is_sgd = type(self._own) is torch.optim.SGD
        is_known = type(self._own).__module__.startswith(("torch.optim.", "app.optim."))
        is_fused = is_sgd or (is_known and all(group.get("fused") for group in self._own.param_groups))
        may_leave = is_fused and kind in parameter_groups.FUSED_DEVICES  # it takes the verdict as `found_inf`
        self._looks = not may_leave or (kind == "cpu" if looks is None else looks)
        self._steps_fused_sgd = not self._looks and is_sgd

    def micro_batch(self) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass; only in the last of a step do ranks reduce gradients."""
        return self._accelerator.accumulate(self._model)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Add a pass's mean loss, a scalar, to the gradient of the step, with this weight: a number, or a scalar on the device.

        The gradient of a step is the mean of what the ranks add, so the weight of a pass is its share of the global batch times
        the number of ranks. Accelerate and DeepSpeed divide by the number of passes, which is undone here and nowhere else.
        """
        if self._before_backward is not None:
            self._before_backward()
        undivided = weight * self._accumulation
        if isinstance(undivided, torch.Tensor):
            loss = loss * undivided.to(loss.dtype)
        elif undivided != 1:
            loss = loss * undivided
        if self._engine is None:
            self._accelerator.backward(loss)
        else:
            self._engine.set_gradient_accumulation_boundary(is_boundary=self._accelerator.sync_gradients)
            self._engine.backward(loss)
        self._lap("forward_backward")

    def take(self, learning_rate: float) -> Step:
        """Clip the gradient, step unless it is skipped, and free the gradient. All ranks call it after the last backward pass.

        A step is skipped if its gradient is not finite, or a spike.
        """
        if self._before_first is not None:
            self._before_first()
            self._before_first = None
        parameter_groups.set_learning_rate(self._own, learning_rate)
        if self._engine is not None:
            self._engine.step()  # clips, skips what is not finite, and frees the gradient
            norm = float(self._engine.get_global_grad_norm())
            step = Step(norm, not norm < self._spikes.limit or bool(self.optimizer.step_was_skipped), learning_rate)
        else:
            step = Step(*self._take_unless_spoilt(), learning_rate)
            for parameter in self._parameters:
                parameter.grad = None
        self._last_norm = step.grad_norm
        self._spikes.see(step.grad_norm, skipped=step.skipped)
        self._lap("optimizer")
        return step

    def skip(self, learning_rate: float) -> Step:
        """Return the outcome of a step that the recipe skips, and change nothing. All ranks call it instead of `take`."""
        self._spikes.see(None, skipped=True)
        return Step(math.nan, True, learning_rate, by_recipe=True)

    @property
    def verdict(self) -> str:
        """The norm of the last step's gradient, and the limit it was compared with, in words."""
        norm, limit = float(self._last_norm), float(self._spikes.limit)
        return f"its gradient norm is {norm:.3g}" + (f", and a spike from {limit:.3g} on" if math.isfinite(limit) else "")

    def _take_unless_spoilt(self) -> tuple[torch.Tensor | float, torch.Tensor | bool]:
        """Return the norm of the gradient, and whether the step was skipped, as `Step` has them."""
        if self._scaler is not None:
            self._scaler.unscale_(self._own)
        norm = self._norm_and_clip()
        skipped: torch.Tensor | bool
        if isinstance(norm, float):
            skipped = not norm < self._spikes.limit
        else:
            skipped = torch.logical_not(norm < self._spikes.limit, out=torch.empty_like(norm, dtype=torch.float32))
            self._own.found_inf = skipped
        if skipped is not True:
            if self._steps_fused_sgd:
                parameter_groups.fused_sgd_step(self._own)
            else:
                self._own.step()
        if self._scaler is not None:
            self._scaler.update()
        return norm, skipped

    def take_norm(self) -> float:
        """Return the norm of the gradient of the passes since the last step, and free it. Not for DeepSpeed."""
        norm = float(self._gradients_and_norm()[1]) / (self._scaler.get_scale() if self._scaler is not None else 1.0)
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def _norm_and_clip(self) -> torch.Tensor | float:
        """Return the norm of the gradient before clipping: a float if the host needs it, else a scalar on the device."""
        gradients, norm = self._gradients_and_norm()
        if self._clip_norm is not None:  # as torch's clip_grads_with_norm_ does
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0]))
        return norm.item() if self._looks else norm

    def _gradients_and_norm(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return what this rank holds of the gradient, and the norm of the whole, in which each element counts once."""
        gradients: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []
        for parameters in self._by_copies.values():
            own = [parameter_groups.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            norms.append(_norm(own))
            gradients += own
        if self._is_sharded:
            squares = [norm.square() / copies for norm, copies in zip(norms, self._by_copies, strict=True)]
            norm: torch.Tensor = self._accelerator.reduce(torch.stack(squares).sum(), "sum").sqrt()
        else:
            (norm,) = norms
        return gradients, norm


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements, a float64 scalar on the device of the tensors.

    On a CPU torch adds up a tensor in a few float32 accumulators: the norm of 6 million elements is off by 2e-4, and the norm
    of a shard by less. By rows it is off by 1e-7, and not slower. On GPUs torch's kernel takes pieces of 65,536 elements
    itself.
    """
    if tensors[0].device.type == "cpu":
        tensors = [_row_norms(tensor) if tensor.numel() > _LARGE else tensor for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)), dtype=torch.float64)
    return norm


def _row_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norms of rows of the tensor, 1-D, whatever its shape is: elements are taken in the order of memory."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    rest = flat.numel() % _ROW
    norms = torch.linalg.vector_norm(flat[: flat.numel() - rest].view(-1, _ROW), dim=1)
    return torch.cat([norms, flat[-rest:].norm()[None]]) if rest else norms


_WINDOW = 128
"""Number of norms of which the median is taken."""
_FIRST = 64
"""Fewest norms for a median; before, every finite norm is accepted."""
_EVERY = 16
"""Steps between updates of the limit, so that a step costs no more than a test for finite values."""


class SpikeGuard:
    """Tells spikes from the gradient norms of all steps, floats or scalars on a device; nothing waits for the device."""

    def __init__(self, factor: float | None) -> None:
        """`factor` is how many times the median, or the first one, a norm may be; None: any."""
        self._factor, self._steps, self._first = factor, 0, torch.tensor(math.nan)
        self._kept = torch.empty(0)  # float32, in the order of steps; NaN: skipped
        self._new: list[tuple[torch.Tensor | float, torch.Tensor | bool]] = []
        self.limit: torch.Tensor | float = math.inf
        """Only norms below it are accepted; NaN and infinity are not."""

    def see(self, norm: torch.Tensor | float | None, *, skipped: torch.Tensor | bool) -> None:
        """Take in the gradient norm of the run's next step (a scalar; None: not computed), and if it was skipped, as in `Step`.

        A step without a norm counts as a step, so that a resumed run updates the limit at the same steps.
        """
        if self._factor is None:
            return
        self._steps += 1
        if norm is not None:
            self._new.append((norm, skipped))
        if self._steps % _EVERY == 0:
            self._kept, self._new = self._all()[-_WINDOW:], []
            count, median = (~self._kept.isnan()).sum(), self._kept.nanmedian()
            first = self._first.to(median.device, non_blocking=True)
            self._first = torch.where(first.isnan() & (count >= _FIRST), median, first)
            limit = self._factor * torch.maximum(median, self._first)  # NaN while too few are known; 0: all gradients were
            limit = torch.where(limit > 0, limit, math.inf)
            self.limit = limit if isinstance(norm, torch.Tensor) else limit.item()

    def state(self) -> dict[str, Any] | None:
        """Return what the verdicts of later steps need, as JSON has it; None if any norm is accepted."""
        if self._factor is None:
            return None
        norms = self._all()
        known = {"limit": float(self.limit), "first_median": float(self._first)}
        finite = {name: value if math.isfinite(value) else None for name, value in known.items()}
        return {"norms": norms[~norms.isnan()][-_WINDOW:].tolist(), **finite}

    def load(self, state: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue from the `state` after this number of steps of the run."""
        self._steps = step
        if state is not None and self._factor is not None:
            self._kept = torch.tensor(state["norms"], dtype=torch.float32)
            self.limit = math.inf if state["limit"] is None else state["limit"]
            self._first = torch.tensor(math.nan if state["first_median"] is None else state["first_median"])

    def _all(self) -> torch.Tensor:
        """Return the norms that are kept and the new ones, float32: norms of skipped steps, as NaN, come first."""
        if not self._new:
            return self._kept
        norms, skipped = zip(*self._new, strict=True)
        if isinstance(norms[0], torch.Tensor):
            new = torch.where(torch.stack(skipped).bool(), math.nan, torch.stack(norms).float())
        else:
            new = torch.tensor([math.nan if left_out else norm for norm, left_out in self._new], dtype=torch.float32)
        every = torch.cat([self._kept.to(new.device, non_blocking=True), new])
        return every[(~every.isnan()).byte().argsort(stable=True)]


def leave_out(optimizer: torch.optim.Optimizer, is_spike: Callable[[], bool]) -> None:
    """Have steps of the optimizer that others take change nothing if `is_spike` returns True.

    torch's optimizers, and DeepSpeed's for the CPU, pass over a parameter without a gradient, with its state. So the gradients
    are taken away before such a step, and given back after it, since some owners fill the same tensors again.
    """
    held: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def take_away(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_spike():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            held.extend((parameter, parameter.grad) for parameter in parameters)
            for parameter in parameters:
                parameter.grad = None

    def give_back(*_: Any) -> None:
        while held:
            parameter, gradient = held.pop()
            parameter.grad = gradient

    optimizer.register_step_pre_hook(take_away)
    optimizer.register_step_post_hook(give_back)


class FirstGradients:
    """Checks the gradients of this process's first step, in a new run or a resumed one."""

    def __init__(self, model: nn.Module, together: Callable[[], AbstractContextManager[None]]) -> None:
        """`model` is prepared, without wrappers; `together` agrees on an error with all ranks."""
        self._together = together
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._arrived: set[str] = set()
        self._hooks = [
            parameter.register_hook(lambda _gradient, name=name: self._arrived.add(name))
            for name, parameter in self._parameters.items()
        ]

    def check(self) -> None:
        """Raise TrainingError, on all ranks, if a parameter got no gradient. Called once, after the step's backward passes."""
        for hook in self._hooks:
            hook.remove()
        names = [name for name, one in self._parameters.items() if name not in self._arrived and one.grad is None]
        self._hooks, self._parameters = [], {}
        with self._together():
            if names:
                raise TrainingError(
                    f"{len(names)} trainable parameters have no gradient after the first step's backward passes: "
                    f"{listed(names)}. The loss must depend on every parameter that is trained: use it in the model's forward "
                    "pass, freeze it (train.freeze), or remove it from the model."
                )
