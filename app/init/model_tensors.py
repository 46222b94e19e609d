"""The tensors of a model before it is prepared: this rank's regions of them, their hash, and how stored weights differ.

A rank has the whole model or, of a model that FSDP2 or ZeRO-3 shards unit by unit, a region of each parameter and all buffers.
Weights are read into the model, checked and hashed by these regions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.data import order
from app.distributed.runtime import Runtime
from app.errors import TrainingError
from app.init.region import BUFFER, WEIGHT, Piece, Region, copies

_CHUNK = 1 << 16
"""Elements that are hashed at a time, which fit the processor's caches."""
_OLD_BUFFERS = ("attn.masked_bias", "attention.masked_bias")
"""Endings of constants that older versions of transformers stored, and that no network has any more."""


def local_pieces(model: nn.Module) -> dict[str, Piece]:
    """Return this rank's share of each parameter and buffer, by all of its names; a tied tensor is one `Piece`."""
    found: dict[int, Piece] = {}
    sharded = is_sharded(model)
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: found.setdefault(id(tensor), _local_piece(name, tensor, sharded=sharded)) for name, tensor in named}


def _local_piece(name: str, tensor: Any, *, sharded: bool) -> Piece:
    key = WEIGHT if isinstance(tensor, nn.Parameter) else BUFFER
    if hasattr(tensor, "ds_tensor"):  # a flat range; elements past the parameter's end are padding
        shape, values = tuple(tensor.ds_shape), tensor.ds_tensor.data.view(-1)
        start = values.numel() * tensor.ds_zero_partition_rank
        count = max(0, min(values.numel(), prod(shape) - start))
        return Piece(key, name, shape, Region.flat(start, count), values[:count])
    number = copies(tensor, name) if sharded and key == WEIGHT else (1, 0)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Piece(key, name, tuple(tensor.shape), Region.of(tensor, name), local.detach().view(-1), number)


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank has a part of the parameters: DTensors, or parameters that DeepSpeed has sharded."""
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor") for parameter in model.parameters())


def check_finite(runtime: Runtime, model: nn.Module, source: str) -> None:
    """Raise TrainingError, on all ranks, for a weight from `source` that is not finite; a mask in a buffer can be infinite."""
    with runtime.together():
        for it in local_pieces(model).values():
            if not it.values.dtype.is_floating_point or not it.values.numel():
                continue
            extremes = [float(value) for value in it.values.aminmax()]  # without memory; a NaN is both of them
            wrong = [value for value in extremes if math.isnan(value) or (it.key == WEIGHT and math.isinf(value))]
            if wrong:
                raise TrainingError(
                    f"the initial weights from {source} contain {wrong[0]}, in {it.name}: nothing can be trained from them. "
                    "Use weights that are finite, or correct what initializes this tensor."
                )


def digest(model: nn.Module, gather: Callable[[Any], list[Any]]) -> str:
    """Return a hash of the model's parameters and buffers, of 16 hexadecimal digits, which does not depend on the sharding.

    Called by all ranks together; `gather` returns every rank's value.
    """
    tensors = {id(it): it for it in local_pieces(model).values()}.values()
    parameters = sum(digest_of(it.name, it.values, it.region) for it in tensors if it.key == WEIGHT and it.copies[1] == 0)
    if is_sharded(model):
        parameters = sum(gather(parameters))
    return as_text(parameters + sum(digest_of(it.name, it.values) for it in tensors if it.key == BUFFER))


def digest_of(name: str, values: Tensor, region: Region | None = None) -> int:
    """Return a number for the elements `region` of a tensor, or all; the numbers of its regions add up to its own."""
    key = order.derive_key(0, name, str(values.dtype))
    flat, total = values.detach().reshape(-1), 0
    region = region or Region.flat(0, flat.numel())
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK].cpu().contiguous()
        bits = part.view(torch.uint8).numpy().reshape(part.numel(), -1)
        numbers = bits.view(f"u{bits.shape[1]}").astype(np.uint64).reshape(-1)
        places = np.arange(at, at + part.numel(), dtype=np.uint64)  # in the flattened tensor
        if region.runs > 1:
            lines, places = np.divmod(places, np.uint64(region.run))
            places += lines * np.uint64(region.stride)
        places += np.uint64(region.start)
        places *= np.uint64(order.GOLDEN64)
        places ^= np.uint64(key)
        numbers *= np.uint64(order.MIX_FIRST)
        numbers += places
        total += int(order.mix64_array(numbers).sum(dtype=np.uint64))
    return total & order.MASK64


def as_text(total: int) -> str:
    """Return a sum of `digest_of` as digits."""
    return f"{total & order.MASK64:016x}"


# ---- Differences between stored weights and a model, in the same words whichever library has compared the names --------------


def name_differences(
    missing: Iterable[str], left_over: Iterable[str], shapes: Iterable[tuple[str, Any, Any]] = ()
) -> dict[str, str]:
    """Return a phrase for each name that does not fit; names of the model and of the file alternate.

    `shapes` has names with their shape in the file and in the model.
    """
    ours = {name: f"{name} is not in the file" for name in missing}
    ours |= {name: f"{name} is {tuple(there)} in the file and {tuple(here)} in the model" for name, there, here in shapes}
    theirs = {name: f"{name} is not in the model" for name in left_over}
    return dict(named for pair in zip_longest(ours.items(), theirs.items()) for named in pair if named)


def tie_differences(names: Iterable[str]) -> dict[str, str]:
    """Return a phrase for each name of a tied tensor that the file has with different values."""
    return {name: f"{name} is tied to another tensor, of which the file has other values" for name in names}


def unneeded_names(model: Any, left_over: Iterable[str]) -> set[str]:
    """Return the names, of those that the model does not have, of buffers that it computes itself or that no network uses."""

    def end(name: str) -> str:  # the same buffer was in each layer once, and is in the model now
        return ".".join(name.split(".")[-2:])

    saved = model.state_dict(keep_vars=True)
    ends = {*_OLD_BUFFERS, *(end(name) for name, _ in model.named_buffers(remove_duplicate=False) if name not in saved)}
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers' own, for from_pretrained
    return {name for name in left_over if end(name) in ends or any(re.search(pattern, name) for pattern in patterns)}


def loading_differences(model: Any, info: Mapping[str, Any]) -> dict[str, str]:
    """Return the differences of a model that transformers has loaded, from its `output_loading_info`."""
    # If a file has both of two tied tensors, with different values, transformers separates them (from 5.0 on).
    has_ties = hasattr(model, "get_expanded_tied_weights_keys")
    ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys if has_ties else ()
    missing, left_over, shapes = (info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    left_over = sorted({*left_over} - unneeded_names(model, left_over))
    return name_differences(sorted(missing), left_over, sorted(shapes)) | tie_differences(sorted(ties))
