"""The last layer of a language model, which gives the loss of its targets without holding all logits.

Shapes: B rows, S tokens a row, H numbers a token, V tokens in the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of what does not count; that of torch and transformers."""


class Head(nn.Linear):
    """A linear layer with the parameters of the one that it takes the place of, ties included.

    The loss is computed in its `forward`, so that FSDP2 and ZeRO-3 gather its weights for that as for the logits.
    """

    def __init__(self, like: nn.Linear, *, chunked: bool) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, device="meta")
        self.weight = like.weight
        self.bias = like.bias
        self.chunked = chunked

    def forward(self, hidden: Tensor, labels: Tensor | None = None, *, by_row: bool = False) -> Tensor:
        """Return the logits [B, S, V]; with labels int64 [B, S] the sum of nats of all, or `by_row` of each row [B]."""
        if labels is None:
            return super().forward(hidden)
        if not self.chunked or hidden.is_meta:  # without data logits cost nothing, and their FLOPs are counted
            return nats_of(super().forward(hidden), labels, by_row=by_row)
        # Half precision has three digits, too few for a sum of losses.
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            found = F.linear_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]).to(dtype),
                self.weight.to(dtype),
                labels.reshape(-1),
                linear_bias=None if self.bias is None else self.bias.to(dtype),
                reduction="none" if by_row else "sum",
                ignore_index=IGNORED,
                options=nn.LinearCrossEntropyOptions(),
            )
        return found.view(labels.shape).sum(1) if by_row else found


def nats_of(logits: Tensor, labels: Tensor, *, by_row: bool) -> Tensor:
    """Return the sum of nats of labels int64 [B, S] by logits [B, S, V], or `by_row` of each row [B]; in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    found = F.cross_entropy(exact, labels.reshape(-1), ignore_index=IGNORED, reduction="none" if by_row else "sum")
    return found.view(labels.shape).sum(1) if by_row else found
