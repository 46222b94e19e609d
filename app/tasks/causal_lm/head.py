"""The last layer of a language model, which gives the loss of its targets without holding all logits.

A head may be sharded over the vocabulary, so that each process has the weights of some consecutive tokens. As in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053, section 3), the processes then exchange three numbers a token, no logits.

Shapes: B rows, S tokens a row, T tokens in all, H numbers a token, V tokens in the vocabulary, of which this process has P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of tokens that do not count, as in torch and transformers."""
_HALF = (torch.bfloat16, torch.float16)
_FEWEST_TOKENS = 256


class Head(nn.Linear):
    """A linear layer with the parameters of the one that it takes the place of, ties included.

    The loss is computed in its `forward`, so that FSDP2 and ZeRO-3 gather its weights for that as for the logits.
    """

    divides_itself: ClassVar[bool] = True
    """Under tensor parallelism its weights are a part of the vocabulary's: this knows what to do with them."""

    def __init__(self, like: nn.Linear, *, chunked: bool) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, device="meta")
        self.weight = like.weight
        self.bias = like.bias
        self.chunked = chunked

    def forward(self, hidden: Tensor, labels: Tensor | None = None, *, by_row: bool = False) -> Tensor:
        """Return the logits [B, S, V]; with labels int64 [B, S] the sum of nats of all, or `by_row` of each row [B]."""
        if isinstance(self.weight, DTensor):
            return self._in_parts(hidden, labels, self.weight, by_row=by_row)
        if labels is None:
            return super().forward(hidden)
        if not self.chunked or hidden.is_meta:  # without data logits cost nothing, and their FLOPs are counted
            return nats_of(super().forward(hidden), labels, by_row=by_row)
        in_half = torch.is_autocast_enabled(hidden.device.type) or self.weight.dtype in _HALF
        if in_half or not hasattr(F, "linear_cross_entropy"):  # torch has it from 2.13 on
            return self._by_chunks(hidden, labels, by_row=by_row)
        found = F.linear_cross_entropy(
            hidden.flatten(0, 1).to(self.weight.dtype),
            self.weight,
            labels.reshape(-1),
            linear_bias=self.bias,
            reduction="none" if by_row else "sum",
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        return found.view(labels.shape).sum(1) if by_row else found

    def _by_chunks(self, hidden: Tensor, labels: Tensor, *, by_row: bool) -> Tensor:
        """Compute the logits of some tokens at a time, and once more in the backward pass.

        torch's own function does without the second time, but adds half-precision losses up in half precision: 17,408
        instead of 18,518 for 2,048 tokens (torch 2.15).
        """

        def nats(tokens: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(tokens, self.weight, self.bias)
            return nats_of(logits[:, None], targets[:, None], by_row=by_row)

        parts = self._parts(nats, hidden, labels)
        return torch.cat(parts).view(labels.shape).sum(1) if by_row else torch.stack(parts).sum()

    def _in_parts(self, hidden: Tensor, labels: Tensor | None, weight: DTensor, *, by_row: bool) -> Tensor:
        """Do the same as `forward` with a part of the vocabulary, together with the processes that have the others."""
        if labels is None:
            logits: Tensor = super().forward(_replicated(hidden, weight)).full_tensor()  # type: ignore[attr-defined]
            return logits
        own, bias = weight.to_local(), self.bias.to_local() if isinstance(self.bias, DTensor) else None

        def nats(tokens: Tensor, targets: Tensor) -> Tensor:
            return _nats_of_part(F.linear(tokens, own, bias), targets, weight)

        # The gradient of the hidden states is the sum of the processes' gradients.
        shared: Tensor = _replicated(hidden, weight).to_local(grad_placements=[Partial()])
        found = torch.cat(self._parts(nats, shared, labels))
        return found.view(labels.shape).sum(1) if by_row else found.sum()

    def _parts(self, nats: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor) -> list[Tensor]:
        """Return what `nats` makes of some tokens at a time, which it computes once more in the backward pass."""
        tokens, targets = hidden.flatten(0, 1), labels.reshape(-1)
        # Logits that take as much memory as `hidden`, but not so few that the products get small.
        size = max(_FEWEST_TOKENS, len(tokens) * self.in_features // self.out_features) if self.chunked else len(tokens)
        pairs = zip(tokens.split(size), targets.split(size), strict=True)
        return [checkpoint(nats, *pair, use_reentrant=False) if self.chunked else nats(*pair) for pair in pairs]


def nats_of(logits: Tensor, labels: Tensor, *, by_row: bool) -> Tensor:
    """Return the sum of nats of labels int64 [B, S] by logits [B, S, V], or `by_row` of each row [B]; in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    found = F.cross_entropy(exact, labels.reshape(-1), ignore_index=IGNORED, reduction="none" if by_row else "sum")
    return found.view(labels.shape).sum(1) if by_row else found


def _replicated(hidden: Tensor, weight: DTensor) -> DTensor:
    return DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)


def _nats_of_part(logits: Tensor, targets: Tensor, weight: DTensor) -> Tensor:
    """Return the nats [T] of all targets int64 [T], 0 where they are ignored, by this process's logits [T, P]."""
    mesh, count = weight.device_mesh, logits.shape[1]
    first = mesh.get_local_rank() * count
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greatest = DTensor.from_local(exact.detach().amax(1), mesh, [Partial("max")], run_check=False).full_tensor()
    is_own = (targets >= first) & (targets < first + count)
    own = exact.gather(1, (targets - first).where(is_own, 0)[:, None])[:, 0].where(is_own, 0.0)
    parts = torch.stack([(exact - greatest[:, None]).exp().sum(1), own])
    total, wanted = DTensor.from_local(parts, mesh, [Partial()], run_check=False).full_tensor()
    nats: Tensor = total.log() + greatest - wanted
    return nats.where(targets != IGNORED, 0.0)
