"""Activation checkpointing: blocks of a model keep only their inputs, and are recomputed in the backward pass.

Accelerate's own leaves torch's generators as they stand by then (accelerate 1.15, utils/fsdp_utils.py), so with dropout the
loss is right and the gradient is not. This puts them back, and `sample_dropout` draws a sample's mask again in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from app.errors import RecipeError


def compute_blocks_again(model: nn.Module, classes: Collection[str]) -> None:
    """Have each outermost module of these classes compute its forward pass again for the backward pass; names stay.

    Raises RecipeError if the model has none.
    """
    inside: set[nn.Module] = set()
    for block in model.modules():
        if block not in inside and type(block).__name__ in classes:
            inside.update(block.modules())
            block.forward = _again(block, block.forward)
    if not inside:
        named = f"its blocks are said to be {', '.join(sorted(classes))}, and it has none" if classes else "it names no blocks"
        raise RecipeError(
            f"train.checkpoint_activations is blocks, but for the model, a {type(model).__name__}, {named}: set it to none, or "
            'give the classes of its layers in the task, as in blocks = ("Layer",)'
        )


def _again(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the block's `forward`, whose inputs alone are kept.

    What stands around it, as the hooks that gather the block's weights, is called once: for the backward pass it gathers them
    by itself.
    """

    def computed(*inputs: Any, **named: Any) -> Any:
        with _buffers_kept(block):
            return forward(*inputs, **named)

    def of_block(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(computed, *inputs, use_reentrant=False, **named)

    return of_block


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """In a backward pass, put the block's buffers back: batch norms have seen this batch already."""
    if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
        yield
        return
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:  # torch ends the second pass by an exception as soon as it has what it needs
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)
