"""Context parallelism: each process of a group computes with its part of every row.

The parts are consecutive and equal. A row that cannot be split evenly is padded with tokens that are hidden from the others and
do not count. An attention function gathers keys and values from the group, as Llama 3 does for long contexts (Grattafiori et
al. 2024, arXiv:2407.21783, section 3.3.2), and the queries of a part attend to them up to the end of the part. The last process
has the most to compute. Rows without labels, such as generated texts, stay whole on every process.

Shapes: B rows, S tokens a row, padded; L tokens of a part, E tokens up to its end; N heads, D numbers a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from app.errors import PresetError

_NAME = "samerun_context_parallel"
"""Name of the attention function in transformers."""
_HALF = (torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """The part of the rows of a pass that this process computes with."""

    mesh: DeviceMesh
    """The processes that have the other parts, in the order of the parts; of one dimension."""
    first: int
    """Position of its first token in a row."""
    documents: Tensor | None
    """Number of each token's document, int64 [B, S]; None: a row is one document."""
    is_eager: bool
    """True if attention is computed without fused kernels."""


def register(model: Any) -> None:
    """Have a network of transformers compute attention by `_attention`.

    Raises PresetError for other kinds of attention, and for positions whose encoding depends on the length of the rows.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise PresetError(
            f"context parallelism gathers keys and values for model.attention=sdpa or eager, and model.attention is {kind}: "
            "set it to sdpa"
        )
    rope: Mapping[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    kinds = [it.get("rope_type") for it in (rope, *rope.values()) if isinstance(it, Mapping)]  # of all layers, or by their type
    # `dynamic_rope_update` would see the part alone (transformers 5.24).
    if varying := [it for it in kinds if it in ("dynamic", "longrope")]:
        raise PresetError(
            f"the network has positions of rope_type {varying[0]}, which depend on the length of the rows, and under context "
            "parallelism each process has a part of them: use fsdp2.yaml"
        )
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])
    model.config._attn_implementation = _NAME


def split(
    mesh: DeviceMesh, labels: Tensor, named: Mapping[str, Tensor], *, is_eager: bool, ignored: int
) -> tuple[Tensor, dict[str, Any]]:
    """Return this process's part of labels, int64 [B, S], and of the inputs `input_ids` and `position_ids`, as `forward` takes
    them. `ignored` is the label of tokens that do not count."""
    length = labels.shape[1]
    share = -(-length // mesh.size())
    first, missing = share * mesh.get_local_rank(), share * mesh.size() - length

    def own(rows: Tensor, filler: int) -> Tensor:
        return F.pad(rows, (0, missing), value=filler)[:, first : first + share]

    positions, documents = named.get("position_ids"), None
    if positions is not None:  # they begin anew with each document
        documents = F.pad((positions.diff(dim=1, prepend=positions[:, :1]) != 1).cumsum(1), (0, missing))
    else:
        positions = torch.arange(length, device=labels.device)[None]
    return own(labels, ignored), {
        "input_ids": own(named["input_ids"], 0),
        "position_ids": own(positions, 0),
        "attention_mask": labels.new_empty(1, 1, 1, 1),  # or transformers would make one that nothing uses
        "part": Part(mesh, first, documents, is_eager),
    }


def summed(nats: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the nats of all parts.

    Its gradient is the gradient of this process's part, times the number of processes. The mean over all processes, which
    FSDP2 takes, is then the gradient of whole rows.
    """
    whole = nats.detach().clone()
    torch.distributed.all_reduce(whole, group=mesh.get_group())
    return whole + mesh.size() * (nats - nats.detach())


@torch.compiler.disable
def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    part: Part | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Return the outputs [B, L, N, D] for the queries [B, N, L, D] of a part, by its own keys and values [B, N, L, D]."""
    if part is None:
        from transformers import AttentionInterface

        if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:  # the one of `split`
            raise PresetError(
                f"{type(module).__name__} does not get the part of the rows that it is called with: use fsdp2.yaml"
            )
        whole: tuple[Tensor, None] = AttentionInterface()["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named
        )
        return whole
    length = query.shape[2]
    end = part.first + length
    key, value = _gathered(key, part.mesh)[:, :, :end], _gathered(value, part.mesh)[:, :, :end]
    # Fused kernels compute both without a mask in memory. The bias is a prototype (torch 2.14).
    mask: Tensor | None = causal_lower_right(length, end) if part.first else None
    is_plain = not (part.is_eager or part.documents is not None or (sliding_window or end) < end)
    if not is_plain:
        places = torch.arange(end, device=query.device)
        distance = places[part.first :, None] - places
        mask = (distance >= 0) & (distance < (sliding_window or end))
        if part.documents is not None:
            documents = part.documents[:, None, :end]
            mask = mask & (documents[..., part.first :, None] == documents[..., None, :])
    groups = query.shape[1] // key.shape[1]
    is_grouped = groups > 1 and is_plain and query.dtype in _HALF  # only torch's flash attention shares keys among heads
    if groups > 1 and not is_grouped:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    with sdpa_kernel(SDPBackend.MATH) if part.is_eager else nullcontext():
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )
    return output.transpose(1, 2).contiguous(), None


def _gathered(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the keys or values [B, N, S, D] of all parts; each process adds to the gradient of all."""
    return DTensor.from_local(own.contiguous(), mesh, [Shard(2)], run_check=False).full_tensor(grad_placements=[Partial()])
