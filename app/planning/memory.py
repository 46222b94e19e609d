"""Memory that a device needs for a training step, by kind, before the job, and what to change when a run is out of memory.

What a pass holds is traced on tensors without data (`tracing`). What exists during the whole step is counted: weights, the
optimizer's states, gradients in buffers of their own.

What DeepSpeed takes for ZeRO is computed from its settings, as the shipped presets have them: at their defaults. It is not
traced, because its engine does not run on tensors without data. The rules were read in deepspeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py, config.py); benchmarks/RESULTS.md has measurements.

Not counted: the libraries' memory on a GPU, fragmentation, workspaces of kernels, evaluations, checkpoints and building.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from app.distributed.runtime import Runtime
from app.environment.launched import Sharding
from app.errors import LackOfMemoryError
from app.init import filling
from app.optim import parameter_groups
from app.planning import tracing
from app.planning.tracing import KINDS, Blueprint, Bytes, PassOptions
from app.recipe import optimizers
from app.recipe.schema import OptimRecipe, Recipe

Shape = tuple[int, ...]

_WHOLE = 4
"""Bytes of a number that DeepSpeed's optimizer steps on."""
_BUCKET = 500_000_000
"""Elements of the buffer that DeepSpeed adds up gradients in, for a model of any size (`reduce_bucket_size`)."""
_LIVE = 1_000_000_000
"""Elements of weights that ZeRO-3 can keep gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""
_SUBGROUP = 1_000_000_000
"""Elements that ZeRO-3 steps on at a time (`sub_group_size`)."""
_SIZES = (2, 4)
"""Samples of the passes that are traced. One alone is different for batch normalization."""
_PRIMES = (2, 3, 5, 7, 11, 13)


class Memory(NamedTuple):
    """Bytes of one device at the worst moment of a step, by kind."""

    weights: int = 0
    """Weights that the device keeps, and those that it gathers for a pass."""
    gradients: int = 0
    """Gradients, and buffers in which they are added up."""
    optimizer: int = 0
    """Its states, float32 copies of weights in half precision, and an average of the weights (`train.ema_decay`)."""
    activations: int = 0
    """Tensors that layers keep for the backward pass, and work with."""
    loss: int = 0
    """The same for the last layer and the loss: logits."""
    buffers: int = 0
    """Buffers of the model, such as running statistics."""
    host: int = 0
    """Bytes of the host's memory that this process takes for what is offloaded; not part of `total`."""

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(self) - self.host

    def plus(self, **more: int) -> Memory:
        """Return it with more bytes of some kinds."""
        return self._replace(**{kind: getattr(self, kind) + count for kind, count in more.items()})


@dataclass(frozen=True)
class Case:
    """A recipe under a sharding, with a micro-batch."""

    recipe: Recipe
    sharding: Sharding
    micro_batch: int = 1
    """Samples of a pass on one rank."""
    data_ranks: int = 1
    """Ranks among which the global batch is divided."""
    precision: str = "no"
    """Accelerate's word: no, bf16 or fp16."""
    recomputes: bool = False
    """True if blocks are recomputed in the backward pass."""
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def shards(self) -> int:
        """Ranks over which a copy of the model is sharded by FSDP2, 0 without it."""
        ranks = self.data_ranks * self.sharding.context_parallel
        return ranks // self.sharding.replicas if self.sharding.kind == "fsdp2" else 0

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients are tensors of their own, not in the buckets of DDP or DeepSpeed."""
        return self.sharding.kind == "fsdp2" or (self.sharding.stage == 0 and self.data_ranks == 1)


def peak(case: Case) -> Memory:
    """Return what a device of the case needs.

    This process must not have joined others. Raises DataError if the model depends on data that is missing, RecipeError for a
    task whose loss looks at numbers, and PresetError for tensor parallelism that the model does not allow.
    """
    blueprint = tracing.rank_blueprint(case.recipe, case.sharding.tensor_parallel)
    kept, in_step = (_under_zero if case.sharding.stage else _without_zero)(case, blueprint)
    kept = kept.plus(buffers=sum(buffer.nbytes for buffer in blueprint.model.buffers()))
    accumulates = case.recipe.train.global_batch_size // (case.micro_batch * case.data_ranks) > 1
    moments = [
        kept.plus(**dict(zip(KINDS, held, strict=True))).plus(**_zero_in_phase(phase, case, blueprint, accumulates=accumulates))
        for phase, held in _passes(case, blueprint).items()
        if accumulates or not phase.endswith(tracing.LATER)
    ]
    moments.append(kept.plus(**in_step))
    return max(moments, key=lambda it: it.total)._replace(host=max(moment.host for moment in moments))


def _without_zero(case: Case, blueprint: Blueprint) -> tuple[Memory, dict[str, int]]:
    """Return what exists during the whole step on one process, under DDP and FSDP2, and more while the optimizer steps."""
    recipe = case.recipe
    itemsize: int = getattr(torch, recipe.train.dtype).itemsize
    trained, frozen = [], 0
    matrices: frozenset[str] = frozenset()
    optim, momenta, largest = recipe.optim, 0, 0  # bytes of Muon's only states, and of its largest matrix
    if optim.name == "muon":
        optim, matrices = replace(optim, name="adamw"), parameter_groups.by_muon(blueprint.model, blueprint.classes)
    other = []  # shapes of what Muon does not step on
    for name, parameter in blueprint.model.named_parameters():
        shape = tuple(parameter.shape)
        if shape:  # rank 0's rows, as torch.chunk divides them
            shape = (math.ceil(shape[0] / max(case.shards, 1)), *shape[1:])
        if not parameter.requires_grad:
            frozen += math.prod(shape) * itemsize
            continue
        trained.append(shape)
        if name in matrices:
            momenta += math.prod(shape) * itemsize
            largest = max(largest, parameter.numel() * itemsize)
        else:
            other.append(shape)
    sizes = [math.prod(shape) * itemsize for shape in trained]
    average = sum(sizes) if recipe.train.ema_decay is not None else 0
    optimizer = bytes_of_states(optim, other, itemsize=itemsize) + momenta + average
    extra = _bytes_of_step(optim, sizes, on_gpu=case.device == "cuda" and not case.sharding.offload)
    extra += largest * (5 + (2 if case.shards else case.data_ranks))  # Muon's products, and the matrices of a round
    if case.sharding.offload:  # FSDP2 steps on the host
        return Memory(host=2 * sum(sizes) + frozen + optimizer), {"host": extra}
    gradients = 0 if case.keeps_gradients else sum(sizes)  # DDP's buckets stay
    kept = Memory(weights=sum(sizes) + frozen, gradients=gradients, optimizer=optimizer)
    return kept, {"optimizer": extra, "gradients": sum(sizes) if case.keeps_gradients else 0}


def _zero_sizes(case: Case, blueprint: Blueprint) -> tuple[int, int]:
    """Return the bytes of a weight under ZeRO, and the trained elements of each rank."""
    return _WHOLE if case.precision == "no" else 2, math.ceil(blueprint.trainable / case.data_ranks)


def _under_zero(case: Case, blueprint: Blueprint) -> tuple[Memory, dict[str, int]]:
    """Return what exists during the whole step under ZeRO, and more while DeepSpeed's optimizer steps."""
    recipe, (width, share) = case.recipe, _zero_sizes(case, blueprint)
    is_offloaded = case.sharding.stage == 3 and case.sharding.offload  # then the optimizer steps on the host
    extra = _bytes_of_step(recipe.optim, [share * _WHOLE], on_gpu=case.device == "cuda" and not is_offloaded)
    average = share * _WHOLE if recipe.train.ema_decay is not None else 0
    optimizer = bytes_of_states(recipe.optim, [(share,)]) + average
    if case.sharding.stage < 3:
        kept = Memory(weights=blueprint.parameters * width, optimizer=share * _WHOLE + optimizer)
        return kept, {"gradients": share * (width + _WHOLE), "optimizer": extra}
    weights = (share + math.ceil((blueprint.parameters - blueprint.trainable) / case.data_ranks)) * width
    gradients, bucket = share * width, _BUCKET * width
    if is_offloaded:  # also the float32 weights that are stepped on, and their gradients
        return Memory(gradients=bucket, host=weights + gradients + 2 * share * _WHOLE + optimizer), {"host": extra}
    copies = 0 if width == _WHOLE else share * _WHOLE  # in float32 it steps on the weights themselves
    live = min(blueprint.parameters, _LIVE) * width
    kept = Memory(weights=weights, gradients=gradients + bucket, optimizer=copies + optimizer)
    return kept, {"gradients": min(share, _SUBGROUP) * _WHOLE, "optimizer": extra, "weights": live}


def _zero_in_phase(phase: str, case: Case, blueprint: Blueprint, *, accumulates: bool) -> dict[str, int]:
    """Return the bytes that ZeRO takes in a phase of a pass, which are not traced."""
    stage, (width, share) = case.sharding.stage, _zero_sizes(case, blueprint)
    if stage == 3:
        return {"weights": min(blueprint.parameters, _LIVE + blueprint.largest_unit) * width}
    if stage and phase.startswith("backward"):
        return {"gradients": (blueprint.trainable * width if stage == 1 else 0) + share * width + _BUCKET * width}
    return {"gradients": share * width if stage and accumulates else 0}


def _passes(case: Case, blueprint: Blueprint) -> Mapping[str, Bytes]:
    """Return what a pass holds in each phase."""
    is_half = case.precision != "no"
    how = PassOptions(
        micro_batch=case.micro_batch,
        precision=case.precision,
        half_weights=case.sharding.stage > 0 and is_half,
        recomputes=case.recomputes,
        keeps_gradients=case.keeps_gradients,
        shards=case.shards,
        context_parallel=case.sharding.context_parallel,
        channels_last=case.recipe.train.takes_channels_last(
            tensor_cores=case.device == "cuda" and is_half, preferred=blueprint.task.channels_last
        ),
    )
    return interpolate(case.recipe, case.sharding.tensor_parallel, how)


def interpolate(recipe: Recipe, tensor_parallel: int, how: PassOptions) -> Mapping[str, Bytes]:
    """Return what a pass of any size holds: each phase grows by the same amount with every further sample."""
    few, more = (_traced(recipe, tensor_parallel, how._replace(micro_batch=size)) for size in _SIZES)
    return tracing.on_line(few, more, Fraction(how.micro_batch - _SIZES[0], _SIZES[1] - _SIZES[0]))


@functools.lru_cache(maxsize=256)
def _traced(recipe: Recipe, tensor_parallel: int, how: PassOptions) -> Mapping[str, Bytes]:
    return tracing.peaks(tracing.rank_blueprint(recipe, tensor_parallel), how)


# What an optimizer keeps of each parameter is found by a step on a tiny parameter. Its dimensions are different primes, which
# identifies the dimensions of each state.


def bytes_of_states(recipe: OptimRecipe, shapes: Iterable[Shape], *, itemsize: int = 4) -> int:
    """Return the bytes of the optimizer's states for parameters of these shapes, whose numbers have `itemsize` bytes."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    key = replace(recipe, groups=None, layer_decay=None)
    return sum(
        math.prod(shape[_PRIMES.index(length)] if length in _PRIMES else length for length in state) * size
        for shape in shapes
        for state, size in _states(key, len(shape), dtype)
    )


def _bytes_of_step(recipe: OptimRecipe, sizes: list[int], *, on_gpu: bool) -> int:
    """Return about the bytes that a step takes beyond all that is kept, for parameters of these sizes in bytes.

    On GPUs torch's optimizers that have no fused kernel step on all parameters together, and their temporary tensors are as
    large as these, once or more; on a CPU they step on one after the other.
    """
    kind = "" if optimizers.is_foreign(recipe.name) else optimizers.TABLE[recipe.name].torch_name
    if not sizes or kind in ("Adam", "AdamW") or (kind == "SGD" and on_gpu):  # fused kernels, which work in place
        return 0
    return sum(sizes) if on_gpu else max(sizes)


@functools.cache
def _states(recipe: OptimRecipe, dimensions: int, dtype: torch.dtype) -> list[tuple[Shape, int]]:
    """Return the shape of each state of a parameter [2, 3, 5, ...], and the bytes of one of its numbers."""
    if optimizers.is_foreign(recipe.name):  # planning imports no code of a user's: two states, as most have or less
        recipe = OptimRecipe(name="adamw")
    parameter = nn.Parameter(torch.ones(_PRIMES[:dimensions], dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer: Any = parameter_groups.build_optimizer(recipe, nn.ParameterDict({"weight": parameter}))
    optimizer.step()
    states = optimizer.state[parameter].values()
    return [(tuple(state.shape), state.itemsize) for state in states if isinstance(state, torch.Tensor)]


_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of torch's errors that have no class of their own: the CPU's allocator, and CUDA and cuBLAS outside of torch's."""


@contextmanager
def out_of_memory_explained(runtime: Runtime, recipe: Recipe) -> Iterator[None]:
    """Raise LackOfMemoryError, with what to change, for an allocation that fails in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(text in str(error) for text in _TEXTS):
            raise
        why = f"{runtime.device} is out of memory ({type(error).__name__}: {error})"
        if runtime.plan.is_auto:  # the launcher makes the change
            raise LackOfMemoryError(why) from error
        change = _sharding(runtime).what_to_change(
            runtime.launched.world_size,
            micro_batch=runtime.plan.micro_batch,
            checkpoint_activations=recipe.train.checkpoint_activations,
            on_cpu=runtime.device.type == "cpu",
        )
        raise LackOfMemoryError(f"{why}. {change}") from error


def _sharding(runtime: Runtime) -> Sharding:
    launched, plugin = runtime.launched, getattr(runtime.accelerator.state, "deepspeed_plugin", None)
    zero = plugin.deepspeed_config.get("zero_optimization", {}) if plugin else {}
    if launched.strategy == "fsdp2":
        offload = filling.offloads(runtime.accelerator)
    else:
        devices = ((zero.get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
        offload = any(device not in (None, "none") for device in devices)
    sizes = launched.replicas, launched.tensor_parallel, launched.context_parallel
    return Sharding(launched.strategy, zero.get("stage", 0), offload, *sizes)
