"""Spikes: gradients far larger than those before. Their steps are skipped, as if the gradient were not finite.

One broken batch, flipped bit or wrong kernel can give a finite gradient with a norm of 1e18 between norms of 26, and one step
on it ruins the run. OLMo-core's SkipStepOptimizer leaves out steps more than six standard deviations above the mean of the last
128, once it knows 64 (github.com/allenai/OLMo-core, src/olmo_core/optim). Here a norm is a spike if it is so many times the
median of the last 128 that were stepped on, which one outlier does not move.

Late in a long training norms shrink to a ten-thousandth, and Adam at a constant rate meets steps at which they grow back within
two, to 220,000 times the median (measured: `digits` without decay of the rate, 12,000 steps), from which it recovers. So the
first median of a run counts too, where it is the greater one.

The verdict follows from the run's own history, so a resumed run comes to the same ones. All ranks have the same norm, other
topologies to rounding (3e-7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

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
        self._kept = torch.empty(0)  # float32, in the order of steps; NaN: left out
        self._new: list[tuple[torch.Tensor | float, torch.Tensor | bool]] = []
        self.limit: torch.Tensor | float = math.inf
        """Only norms below it are accepted; NaN and infinity are not."""

    def see(self, norm: torch.Tensor | float, *, skipped: torch.Tensor | bool) -> None:
        """Take in the gradient norm of the run's next step (a scalar), and whether it was left out (as `Step.skipped`)."""
        if self._factor is None:
            return
        self._steps += 1
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
        """Take up what `state` returned after so many steps of the run."""
        self._steps = step
        if state is not None and self._factor is not None:
            self._kept = torch.tensor(state["norms"], dtype=torch.float32)
            self.limit = math.inf if state["limit"] is None else state["limit"]
            self._first = torch.tensor(math.nan if state["first_median"] is None else state["first_median"])

    def _all(self) -> torch.Tensor:
        """Return the norms that are kept and the new ones, float32: those of steps that were left out, as NaN, come first."""
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
    """Have those steps of the optimizer change nothing for which `is_spike` says so: steps that others take.

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
