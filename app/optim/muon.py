"""Muon: matrices take steps along their orthogonalized momentum; AdamW steps on all other parameters.

Muon is Keller Jordan's (https://kellerjordan.github.io/posts/muon/), with the parameters and constants of torch.optim.Muon
(torch 2.14, optim/_muon.py). Which parameters are matrices is decided in `parameter_groups.by_muon`.

The elements of an orthogonal matrix are small where it is large. By default an update is therefore multiplied by
0.2 * sqrt(max(rows, columns)), which gives its elements the root mean square of AdamW's updates: one learning rate and one
weight decay serve all parameters (Moonlight, arXiv:2502.16982, section 2.2).

Newton-Schulz steps do not work on parts of a matrix. So each matrix has one owner, which orthogonalizes it whole and sends the
others their shares: one of all ranks under DDP and FSDP2, and one of each replica under HSDP. Momentum stays where the weights
are, so a checkpoint has it by parameter and range like any state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.recipe.optimizers import ADJUSTMENTS

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the polynomial a x + b x^3 + c x^5, which raises small singular values fast and keeps all near 1."""
_EPS = 1e-7
"""Least norm that a matrix is divided by."""


def orthogonalize(matrix: Tensor, ns_steps: int) -> Tensor:
    """Return about U V^T for the matrix U S V^T, by this number of Newton-Schulz steps in the matrix's own type."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=_EPS)
    for _ in range(ns_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def adjustment(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape, by torch's name of the rule."""
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.AdamW):
    """Muon for parameter groups with `matrices: True`, and AdamW for all others.

    All ranks step together. Momentum is the only state of a matrix.
    """

    def __init__(
        self,
        params: Any,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: float = 5,
        adjust_lr_fn: str = ADJUSTMENTS[0],
        **of_adamw: Any,
    ) -> None:
        """`of_adamw` are AdamW's arguments, of which `lr` and `weight_decay` are for matrices too. Raises ValueError."""
        if not 0 <= momentum < 1:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if ns_steps not in range(1, 100):
            raise ValueError(f"Invalid ns_steps value: {ns_steps}")
        super().__init__(params, **of_adamw)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": int(ns_steps), "adjust_lr_fn": adjust_lr_fn}
        self.defaults |= own
        for group in self.param_groups:
            group.update(own)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, unless `found_inf` (a float32 scalar on the device, as torch's fused kernels take it) is 1."""
        assert closure is None
        groups = self.param_groups
        matrices = [
            (parameter, group)
            for group in groups
            if group.get("matrices")
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if matrices:
            # In rounds of one matrix for each rank: a round takes as long as its largest matrix.
            matrices.sort(key=lambda it: it[0].numel(), reverse=True)
            ranks = _ranks(matrices[0][0])
            size = dist.get_world_size(ranks) if ranks else 1
            for first in range(0, len(matrices), size):
                self._step_on(matrices[first : first + size], ranks)
        self.param_groups = [group for group in groups if not group.get("matrices")]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_on(self, matrices: list[tuple[Tensor, dict[str, Any]]], ranks: dist.ProcessGroup | None) -> None:
        """Step on matrices, each with its group: at most one for each of `ranks`."""
        skipped: Tensor | None = getattr(self, "found_inf", None)
        shapes = [(parameter.size(0), parameter.numel() // parameter.size(0)) for parameter, _ in matrices]
        updates = []
        for (parameter, group), (_, columns) in zip(matrices, shapes, strict=True):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momentum, gradient = _local(self.state[parameter]["momentum_buffer"]), _local(parameter.grad)
            share: float | Tensor = 1 - group["momentum"]
            if skipped is not None:
                gradient = torch.where(skipped > 0, 0, gradient)
                share = share * (1 - skipped).to(gradient.dtype)
            momentum.lerp_(gradient, share)
            update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            # Accelerators multiply bfloat16 several times faster, and torch.optim.Muon has no other type.
            in_half = update.device.type != "cpu" and update.dtype == torch.float32
            updates.append(update.reshape(-1, columns).to(torch.bfloat16 if in_half else update.dtype).contiguous())
        ns_steps, is_sharded = matrices[0][1]["ns_steps"], isinstance(matrices[0][0], DTensor)
        updates = _orthogonalize_together(updates, shapes, ns_steps, ranks, is_sharded=is_sharded)
        for (parameter, group), shape, update in zip(matrices, shapes, updates, strict=True):
            weights, rate = _local(parameter), group["lr"]
            if skipped is not None:
                rate = rate * (1 - skipped).to(weights.dtype)
            weights.mul_(1 - rate * group["weight_decay"])
            weights.sub_(update.to(weights.dtype).view_as(weights) * (rate * adjustment(group["adjust_lr_fn"], *shape)))


def _orthogonalize_together(
    updates: list[Tensor], shapes: list[tuple[int, int]], ns_steps: int, ranks: dist.ProcessGroup | None, *, is_sharded: bool
) -> list[Tensor]:
    """Return this rank's rows of the orthogonalized matrices of these shapes. Rank i of `ranks` orthogonalizes matrix i.

    `updates` are this rank's rows of the matrices: all rows, or a share as torch.chunk makes them if `is_sharded`.
    """
    if ranks is None:
        return [orthogonalize(update, ns_steps) for update in updates]
    size, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    if not is_sharded:
        updates = [
            orthogonalize(update, ns_steps).contiguous() if owner == rank else torch.empty_like(update)
            for owner, update in enumerate(updates)
        ]
        works: list[Any] = [dist.broadcast(it, group=ranks, group_src=owner, async_op=True) for owner, it in enumerate(updates)]
        for work in works:
            work.wait()
        return updates
    counts = [update.numel() for update in updates] + [0] * (size - len(updates))
    rows, columns = shapes[rank] if rank < len(shapes) else (0, 0)
    share = -(-rows // size)
    whole_counts = [min(share, max(0, rows - share * other)) * columns for other in range(size)]
    shares, whole = torch.cat([update.view(-1) for update in updates]), updates[0].new_empty(rows * columns)
    dist.all_to_all_single(whole, shares, whole_counts, counts, group=ranks)
    if rows:
        whole = orthogonalize(whole.view(rows, columns), ns_steps).reshape(-1)
    dist.all_to_all_single(shares, whole, counts, whole_counts, group=ranks)
    return list(shares.split(counts))[: len(updates)]


def _ranks(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share the rows of a DTensor, or all ranks, which hold a plain tensor; None: this one alone."""
    if isinstance(parameter, DTensor):
        (axis,) = (at for at, placement in enumerate(parameter.placements) if placement.is_shard())
        return parameter.device_mesh.get_group(axis)
    return dist.group.WORLD if dist.is_initialized() else None


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
