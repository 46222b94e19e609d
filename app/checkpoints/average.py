"""A moving average of the weights (EMA), sharded like the weights: each rank averages the part that it updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator

from app.checkpoints.shards import Shards


class NoAverage:
    """What a run has without an average."""

    def update(self, skipped: torch.Tensor | bool = False) -> None:
        """Do nothing."""

    def applied(self) -> AbstractContextManager[None]:
        """Leave the model its own weights."""
        return nullcontext()


class WeightAverage:
    """The exponential moving average of a prepared model's weights: average = decay * average + (1 - decay) * weights."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, *, decay: float) -> None:
        self._shards, self._decay = Shards(accelerator, model, optimizer), decay
        self._live = self._shards.weights
        self.tensors = [weights.clone() for weights in self._live]
        """The average, tensor by tensor as `Shards.weights`."""

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | bool = False) -> None:
        """Take the weights after an optimizer step into the average, unless the step was `skipped` (as `Step.skipped`)."""
        if not self.tensors or skipped is True:  # a rank may hold padding alone
            return
        rate = 1.0 - self._decay
        if skipped is False:
            torch._foreach_lerp_(self.tensors, self._live, rate)
            return
        # Of torch's kernels for many tensors those of optimizers take a verdict of the device, and SGD's can average: with the
        # weights as gradients, which decay by -1 of the average, it adds `rate` of the difference to the average.
        torch._fused_sgd_(
            self.tensors, self._live, [], lr=-rate, weight_decay=-1.0, momentum=0.0, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, found_inf=skipped,
        )  # fmt: skip

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights inside the block and its own again after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, average in zip(self._live, self.tensors, strict=True):
            own = live.clone()
            live.copy_(average)
            average.copy_(own)
        self._shards.publish()
