"""A moving average of the weights (EMA), kept where the weights are: each rank averages the part that it owns.

`owned_weights` finds, under every strategy, the full-precision tensors that the optimizer steps on; `publish_weights`
carries a change of them into the weights that the forward pass uses. DeepSpeed's private attributes that this takes are
used here and nowhere else; they were read in deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py and stage3.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor


def owned_weights(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return the live full-precision tensors this rank steps on: all under DDP, its shards under ZeRO and FSDP2."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero = optimizer.optimizer
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            return [flat.data for flat in zero.fp32_partitioned_groups_flat]
        return [flat.data for flat in zero.single_partition_of_fp32_groups]
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]


def publish_weights(accelerator: Accelerator, optimizer: Any) -> None:
    """Make the forward pass use the owned weights as they are now. Called by all ranks together."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    zero = optimizer.optimizer
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero.update_lp_params()
        return
    for group, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if flat.numel():
            zero.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
        parts = zero.unflatten(zero.fp16_partitioned_groups_flat[group], zero.fp16_partitioned_groups[group])
        for part, values in zip(zero.fp16_partitioned_groups[group], parts, strict=True):
            part.data = values.data
    # Parameters that are kept whole on every rank, below the persistence threshold, have to be gathered anew.
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters, has_been_updated=False)
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class WeightAverage:
    """The exponential moving average of a prepared model's weights: average = decay * average + (1 - decay) * weights."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, *, decay: float) -> None:
        self._accelerator, self._optimizer, self._decay = accelerator, optimizer, decay
        self._live = owned_weights(accelerator, model, optimizer)
        self._average = [weights.clone() for weights in self._live]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after an optimizer step into the average."""
        torch._foreach_lerp_(self._average, self._live, 1.0 - self._decay)

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
        for live, average in zip(self._live, self._average, strict=True):
            own = live.clone()
            live.copy_(average)
            average.copy_(own)
        publish_weights(self._accelerator, self._optimizer)
