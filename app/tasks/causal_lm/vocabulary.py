"""The loss of a head that is sharded over the vocabulary: each process has the weights of some consecutive tokens.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the processes exchange three numbers a token, no logits.

Shapes: T tokens, H numbers a token, V tokens in the vocabulary, of which this process has P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def for_all(hidden: Tensor, weight: DTensor) -> Tensor:
    """Return what every process is to compute with: the gradient is the sum of the processes'."""
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    local: Tensor = whole.to_local(grad_placements=[Partial()])
    return local


def logits_of(linear: Any, hidden: Tensor, weight: DTensor) -> Tensor:
    """Return the logits [..., V] of hidden states [..., H] on every process; `linear` is the head's own product."""
    logits: Tensor = linear(DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)).full_tensor()
    return logits


def nats_of_part(logits: Tensor, targets: Tensor, weight: DTensor, *, ignored: int) -> Tensor:
    """Return the nats [T] of all targets int64 [T], 0 of those that are `ignored`, by this process's logits [T, P]."""
    mesh, count = weight.device_mesh, logits.shape[1]
    first = mesh.get_local_rank() * count
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greatest = DTensor.from_local(exact.detach().amax(1), mesh, [Partial("max")], run_check=False).full_tensor()
    is_own = (targets >= first) & (targets < first + count)
    own = exact.gather(1, (targets - first).where(is_own, 0)[:, None])[:, 0].where(is_own, 0.0)
    parts = torch.stack([(exact - greatest[:, None]).exp().sum(1), own])
    total, wanted = DTensor.from_local(parts, mesh, [Partial()], run_check=False).full_tensor()
    nats: Tensor = total.log() + greatest - wanted
    return nats.where(targets != ignored, 0.0)
