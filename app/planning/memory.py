"""How much memory a device needs for a step of training, by kind, before the job: no GPU, no weights, seconds.

What a pass holds is traced on tensors without data (`passes`). What lies there all the time is counted: weights, the states of
the optimizer (`states`), gradients where they have a place of their own. What DeepSpeed takes is worked out (`zero`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import torch

from app.planning import model as models
from app.planning import passes, states, tensor_parallel, zero
from app.planning.case import STRATEGIES, Case, Memory
from app.planning.ledger import KINDS, Bytes
from app.planning.model import Blueprint, Sizes, of_model
from app.recipe.schema import Recipe

__all__ = ["LEFT_OUT", "STRATEGIES", "Case", "Memory", "Sizes", "largest_micro_batch", "of_model", "peak"]

_ZERO = ("zero1", "zero2", "zero3", "zero3_offload")
_SIZES = (2, 4)
"""Samples of the passes that are traced. One alone is another matter for batch normalization."""
_SHARDS = (2, 8, 64)
"""Numbers of shards that are traced: others lie between two of them, or beyond the last. One alone gathers nothing, and is
traced where it is asked for."""
_FSDP2 = ("fsdp2", "hsdp", "tensor_parallel")

LEFT_OUT = (
    (
        "memory of the libraries on a GPU (CUDA context, NCCL's buffers, workspaces of cuBLAS and cuDNN): "
        "counted as 0, not calibrated on a GPU"
    ),
    "fragmentation in torch's allocator",
    "the workspace of each kernel while it runs",
    "evaluations, checkpoints and building the model, which happen outside the steps",
    "on a CPU, FSDP2's gather of a whole weight through gloo",
)
"""What an estimate does not hold."""


def peak(case: Case) -> Memory:
    """Return what a device of the case needs.

    This process must not have joined others. Raises DataError if what the data tells of the model is not known, RecipeError for
    a task whose loss looks at numbers, or for tensor parallelism of a model without a plan.
    """
    blueprint = _of_one_rank(case.plain_recipe, case.tensor_parallel)
    kept = _kept(case, blueprint)
    held = _passes(case, blueprint)
    moments = [
        kept.plus(**dict(zip(KINDS, bytes_of_kinds, strict=True))).plus(**_of_pass(case, blueprint, phase))
        for phase, bytes_of_kinds in held.items()
    ]
    named = [replace(moment, moment=phase) for moment, phase in zip(moments, held, strict=True)]
    moments = [*named, _step(case, blueprint, kept)]
    worst = max(moments, key=lambda it: it.total)
    return replace(worst, host=max(moment.host for moment in moments))


def largest_micro_batch(case: Case, limit: int, *, most: int | None = None) -> int:
    """Return the largest micro-batch with which a case fits into so many bytes; 0: none does.

    Between two sizes the peak lies on a line, or above it only where another moment of the step becomes the worst: so two
    peaks tell where to look, and what is returned was looked at, with the next size too large. `most`: no larger one is
    wanted; None: what a rank's share of the global batch is.
    """
    most = most or max(case.plain_recipe.train.global_batch_size // case.data_ranks, 1)

    @functools.cache
    def of(size: int) -> int:
        return peak(replace(case, micro_batch=size)).total

    if of(1) > limit:
        return 0
    low, high = 1, most + 1  # low fits, high does not or is not wanted
    guess = min(2, most)
    while high - low > 1:
        if of(guess) <= limit:
            low = guess
        else:
            high = guess
        other = high if high <= most else max(1, low - 1)
        slope = (of(other) - of(low)) / (other - low) if other != low else 0
        ahead = low + math.floor((limit - of(low)) / slope) if slope > 0 else most
        guess = min(max(ahead, low + 1), high - 1)
    return low


def _kept(case: Case, blueprint: Blueprint) -> Memory:
    """What lies there during the whole step."""
    recipe, strategy = case.plain_recipe, case.strategy
    itemsize = torch.finfo(getattr(torch, recipe.train.dtype)).bits // 8
    trainable = [tuple(it.shape) for it in blueprint.model.parameters() if it.requires_grad]
    buffers = blueprint.sizes.buffers
    if strategy in _ZERO:
        return zero.kept(case, blueprint).plus(buffers=buffers)
    shards = case.shards if strategy in _FSDP2 else 1
    mine = [_rows(shape, shards) for shape in trainable]
    frozen = [_rows(tuple(it.shape), shards) for it in blueprint.model.parameters() if not it.requires_grad]
    average = sum(map(math.prod, mine)) * itemsize if recipe.train.ema_decay is not None else 0
    return Memory(
        weights=sum(map(math.prod, (*mine, *frozen))) * itemsize,
        gradients=sum(map(math.prod, trainable)) * itemsize if strategy == "ddp" else 0,  # its buckets stay
        optimizer=states.of_shapes(recipe.optim, mine, itemsize=itemsize) + average,
        buffers=buffers,
    )


def _rows(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """The shape of rank 0's rows, as torch.chunk deals them out."""
    return (math.ceil(shape[0] / shards), *shape[1:]) if shape else shape


def _passes(case: Case, blueprint: Blueprint) -> Mapping[str, Bytes]:
    recipe, strategy = case.plain_recipe, case.strategy
    preferred = recipe.train.takes_channels_last(
        tensor_cores=case.device == "cuda" and case.precision != "no", preferred=blueprint.task.channels_last
    )
    how = passes.How(
        micro_batch=case.micro_batch,
        precision=case.precision,
        half_weights=strategy in _ZERO and case.precision != "no",
        checkpoints=case.checkpoint_activations == "blocks",
        passes=2 if strategy in ("single", *_FSDP2) else 1,
        keeps_gradients=strategy not in ("ddp", *_ZERO),
        shards=case.shards if strategy in _FSDP2 else 0,
        channels_last=preferred,
    )
    held = _of_any_size(recipe, case.tensor_parallel, how)
    return {phase: of_phase for phase, of_phase in held.items() if case.accumulation > 1 or not phase.endswith(passes.LATER)}


def _of_any_size(recipe: Recipe, ranks: int, how: passes.How) -> Mapping[str, Bytes]:
    """What a pass of any size on any number of shards holds: two of each are traced.

    In each phase it grows by the same with every further sample. Of what FSDP2 holds, a part is of whole units, and the rest is
    divided by the number of shards.
    """
    if how.shards <= 1 or how.shards in _SHARDS:
        few, more = (_traced(recipe, ranks, how._replace(micro_batch=size)) for size in _SIZES)
        return passes.on_line(few, more, Fraction(how.micro_batch - _SIZES[0], _SIZES[1] - _SIZES[0]))
    ends = _SHARDS[:2] if how.shards < _SHARDS[1] else _SHARDS[1:]
    low, high = (_of_any_size(recipe, ranks, how._replace(shards=shards)) for shards in ends)
    one, other, asked = (Fraction(1, shards) for shards in (*ends, how.shards))
    return passes.on_line(low, high, (one - asked) / (one - other))


@functools.lru_cache(maxsize=256)
def _traced(recipe: Recipe, ranks: int, how: passes.How) -> Mapping[str, Bytes]:
    """The trace that several strategies share."""
    return passes.peaks(_of_one_rank(recipe, ranks), how)


@functools.lru_cache(maxsize=8)
def _of_one_rank(recipe: Recipe, ranks: int) -> Blueprint:
    whole = models.blueprint(recipe)
    return whole if ranks == 1 else tensor_parallel.of_one_rank(whole, ranks)


def _of_pass(case: Case, blueprint: Blueprint, phase: str) -> dict[str, int]:
    """What the strategy takes in this phase that no trace has seen."""
    return zero.in_pass(case, blueprint, phase) if case.strategy in _ZERO else {}


def _step(case: Case, blueprint: Blueprint, kept: Memory) -> Memory:
    """What is held while the optimizer steps."""
    recipe, strategy = case.plain_recipe, case.strategy
    if strategy in _ZERO:
        return replace(zero.step(case, blueprint, kept), moment="step")
    shards = case.shards if strategy in _FSDP2 else 1
    itemsize = torch.finfo(getattr(torch, recipe.train.dtype)).bits // 8
    sizes = [math.prod(_rows(tuple(it.shape), shards)) * itemsize for it in blueprint.model.parameters() if it.requires_grad]
    extra = states.of_step(recipe.optim, sizes, on_gpu=case.device == "cuda")
    gradients = 0 if strategy == "ddp" else sum(sizes)
    return replace(kept.plus(optimizer=extra, gradients=gradients), moment="step")
