"""Changes to a model before training: torch.compile, activation checkpointing, synchronized batch normalization.

A model that cannot be compiled runs uncompiled, with one sentence: torch would end the run with the compiler's traceback.

Accelerate's activation checkpointing does not restore torch's generators (accelerate 1.15, utils/fsdp_utils.py), so with
dropout the loss is right and the gradient is not. `checkpoint_activations` restores them, and `sample_dropout` draws a sample's
mask again in any case.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from torch.utils.checkpoint import checkpoint

from app.errors import PresetError, RecipeError


def survive_compile_failures(accelerator: Accelerator) -> None:
    """See to it that a model, or a part of it, that cannot be compiled is run uncompiled, and said to be once."""
    if accelerator.state.dynamo_plugin.backend == DynamoBackend.NO:
        return
    import torch._dynamo  # takes a second, which only those who compile have to spend
    import torch._functorch.config

    torch._dynamo.config.suppress_errors = True
    # The backward pass is compiled with the forward pass: later, in the first step, a failure would end the run (torch 2.14).
    torch._functorch.config.force_non_lazy_backward_lowering = True
    failures = itertools.count()

    def shorten(record: logging.LogRecord) -> bool:
        """Make the first report of a failure one sentence, and drop the others."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        why = next(iter(str(error).splitlines()), "")
        record.msg = (
            f"torch.compile failed ({type(error).__name__}: {why}); what it could not compile runs uncompiled, with the same "
            "results. Fix the cause, or leave dynamo_backend out of preset and command line."
        )
        record.args, record.exc_info = (), None
        return next(failures) == 0

    # Where torch reports what it has suppressed, at length (torch 2.15).
    logging.getLogger("torch._dynamo.convert_frame").addFilter(shorten)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside what torch.compile has put around it, whose class would take a second to import."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def compile_blocks(accelerator: Accelerator, model: nn.Module, classes: Collection[str]) -> list[str]:
    """If the preset compiles, compile each outermost module of these classes; return a sentence on it. Names stay.

    Blocks of a kind share their code, and what FSDP2, DDP and DeepSpeed do before and after a block stays outside of it: a
    whole model compiled under FSDP2 is slower than in eager mode (huggingface/accelerate #4022). Without gradients, blocks run
    in eager mode: evaluations and generated texts have other shapes, and each would be compiled. Without blocks, Accelerate
    compiles the whole model. Its own `compile_regions` puts modules around blocks, which changes the names of parameters.

    Raises PresetError for blocks under ZeRO-3, and if the preset asks for regions and the model has no blocks.
    """
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return []
    blocks, backend = list(_outermost(model, classes)), plugin.backend.value.lower()
    if blocks:
        deepspeed = accelerator.state.deepspeed_plugin
        if deepspeed is not None and deepspeed.deepspeed_config["zero_optimization"].get("stage") == 3:
            # Its hooks around each layer in a block break up the code: 47 breaks in a Llama of 3 blocks. As DeepSpeed's "leaf
            # modules", which have no such hooks, blocks whose input needs no gradient fail in the backward pass (0.19.8).
            raise PresetError(
                "the preset sets dynamo_backend and ZeRO-3, under which blocks cannot be compiled: leave dynamo_backend out, "
                "or use fsdp2.yaml, which shards as much"
            )
        # Blocks that differ in a number, such as a rate of stochastic depth, are compiled one by one.
        torch._dynamo.config.recompile_limit = 8 + len(blocks)
        # Accelerate's launcher sets False for what a preset leaves out (1.15), and `dynamic` would be decided by the shapes.
        options = {key: value for key, value in plugin.to_kwargs().items() if value is not False}
        for block in blocks:
            block.forward = _compiled_with_gradients(block.forward, options)
        plugin.backend = DynamoBackend.NO  # Accelerate would compile the whole model around them
        return [f"{backend} compiles each of {len(blocks)} blocks ({', '.join(sorted({type(it).__name__ for it in blocks}))})"]
    if plugin.use_regional_compilation:
        raise PresetError(
            f"the preset sets dynamo_use_regional_compilation, but the model, a {type(model).__name__}, has no blocks: remove "
            'the setting, to compile the whole model, or give the classes of its layers in the task, as in blocks = ("Layer",)'
        )
    return [f"{backend} compiles the whole model, a {type(model).__name__}, which names no blocks"]


def _compiled_with_gradients(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward, **options)

    def of_block(*inputs: Any, **named: Any) -> Any:
        return compiled(*inputs, **named) if torch.is_grad_enabled() else forward(*inputs, **named)

    return of_block


def compile_report() -> str:
    """Return a line on what this process has compiled so far, with the time and the most frequent graph break; empty: nothing.

    A graph break ends a compiled piece of code, and Python continues between two of them.
    """
    if "torch._dynamo" not in sys.modules:
        return ""
    from torch._dynamo import utils

    elapsed_s, breaks = utils.calculate_time_spent()["total_wall_time"], utils.counters["graph_break"]
    if not elapsed_s:
        return ""
    why = f", most often: {breaks.most_common(1)[0][0].splitlines()[0]}" if breaks else ""
    return f"compiling took {elapsed_s:.0f} s before the first step; {breaks.total()} graph breaks{why}"


def _outermost(model: nn.Module, classes: Collection[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes that are not inside another one."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and type(module).__name__ in classes:
            inside.update(module.modules())
            yield module


def checkpoint_activations(model: nn.Module, classes: Collection[str]) -> None:
    """Have each outermost module of these classes compute its forward pass again for the backward pass; names stay.

    Raises RecipeError if the model has none.
    """
    blocks = list(_outermost(model, classes))
    for block in blocks:
        block.forward = _again(block, block.forward)
    if not blocks:
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


def synchronize_batchnorm(model: nn.Module, *, device_type: str) -> nn.Module:
    """Return the model with batch statistics taken over all processes.

    Raises RecipeError if it takes none, and on CPU, where torch has no such layer.
    """
    why = None
    if not batchnorms(model):
        why = f"the model, {type(model).__name__}, has no batch normalization: remove it"
    elif device_type == "cpu":
        why = (
            "the run is on CPU, where torch has no synchronized batch normalization: set train.sync_batchnorm=false, choose a "
            "model without batch normalization, or run on GPUs"
        )
    if why:
        raise RecipeError(f"train.sync_batchnorm is true, but {why}")
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    if any(type(layer).__module__.startswith("timm.") for layer in batchnorms(model).values()):
        import timm

        convert = timm.layers.convert_sync_batchnorm  # torch's would drop the activations that are part of timm's layers
    return convert(model)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise RecipeError for layers whose result depends on the micro-batch, which train.max_micro_batch=auto may change."""
    if found := [name for name, layer in batchnorms(model).items() if layer.training]:
        more = f" and {len(found) - 1} more" * (len(found) > 1)
        raise RecipeError(
            f"train.max_micro_batch is auto, but the model has batch normalization ({found[0]}{more}), whose statistics depend "
            "on the micro-batch: set train.max_micro_batch to a number, or freeze these layers"
        )


def topology_dependence(model: nn.Module) -> list[str]:
    """Return a sentence if layers make the result of a recipe depend on the number of processes."""
    found = unsynchronized_batchnorms(model)
    if not found:
        return []
    plural, more = ("s", ", ...") if len(found) > 1 else ("", "")
    return [
        f"{len(found)} batch normalization layer{plural} ({found[0]}{more}): statistics are computed per micro-batch, so "
        "results depend on the number of processes (on GPUs, train.sync_batchnorm=true computes them over all processes)"
    ]


def unsynchronized_batchnorms(model: nn.Module) -> list[str]:
    """Return the names of batch normalizations with statistics per micro-batch; frozen ones, in evaluation mode, have none."""
    return [name for name, it in batchnorms(model).items() if it.training and not isinstance(it, nn.SyncBatchNorm)]


def batchnorms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the model's batch normalizations by their names."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
