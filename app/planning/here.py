"""What a run takes, held against the memory that is here: before its model is filled, and after it was not enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from app.errors import LackOfMemoryError
from app.initial import fsdp2
from app.place import host_memory
from app.planning import kept, states, verdict
from app.planning.kept import Kept
from app.ranks.runtime import Runtime
from app.recipe.schema import Recipe

_MOST = 6 * 8
"""Bytes that weight, gradient, copy and the states of any optimizer take at most of one element, in float64."""
_WHOLE = 4
"""Bytes of a number that DeepSpeed steps on."""
_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of torch's errors that have no class of their own: of the CPU's allocator, and of CUDA and cuBLAS past torch's."""


def check(runtime: Runtime, recipe: Recipe, model: nn.Module) -> None:
    """Raise LackOfMemoryError where weights, gradients and optimizer state are more than all memory that there is.

    `model` has no memory yet, and is whole. Counted is what a rank has on average at the least, so that nothing is refused that
    might run: memory that others use now may be free later. What is offloaded from a GPU is not counted.
    """
    found = _memory(runtime)
    if found is None:
        return
    memory, processes, where = found
    if _MOST * sum(parameter.numel() for parameter in model.parameters()) * processes <= memory:
        return
    needed = _least(runtime, recipe, model) * processes
    if needed > memory:
        strategy, on_cpu = _strategy(runtime), runtime.device.type == "cpu"
        raise LackOfMemoryError(verdict.never_fits(strategy, needed=needed, memory=memory, where=where, on_cpu=on_cpu))


@contextmanager
def lack_of_memory_named(runtime: Runtime, recipe: Recipe, environment: Mapping[str, str]) -> Iterator[None]:
    """Raise LackOfMemoryError for an allocation that fails in the block: what was planned of the recipe, and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        device, found = runtime.device, _memory(runtime)
        said = verdict.ended(
            kept.read(recipe, environment),
            _way(runtime, recipe),
            runtime.plan.micro_batch,
            memory=found[0] if found and device.type == "cuda" else None,
            on_cpu=device.type == "cpu",
        )
        raise LackOfMemoryError(f"{device} is out of memory ({type(error).__name__}: {error}); {said}") from error


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _TEXTS)


def _memory(runtime: Runtime) -> tuple[int, int, str] | None:
    """The bytes of this device or machine, how many processes have them together, and where they are; None: not known."""
    device = runtime.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, 1, f"on {device} ({properties.name})"
    if device.type != "cpu" or (found := host_memory.find()) is None:
        return None
    processes = runtime.launched.local_world_size
    return found.limit, processes, f"here for {processes} process{'es' * (processes > 1)} ({found.origin})"


def _way(runtime: Runtime, recipe: Recipe) -> Kept:
    """How this run runs, by the words of a plan, without what it takes."""
    launched = runtime.launched
    return Kept(
        strategy=_strategy(runtime),
        data_ranks=launched.data_ranks,
        replicas=launched.replicas,
        tensor_parallel=launched.tensor_parallel,
        precision=launched.mixed_precision,
        checkpoint_activations=recipe.train.checkpoint_activations,
        preset="",
        always=0,
        totals=(),
    )


def _strategy(runtime: Runtime) -> str:
    """As `launch/cooperation.py` has it of a preset."""
    launched = runtime.launched
    if launched.strategy == "fsdp2":
        return "tensor_parallel" if launched.tensor_parallel > 1 else "hsdp" if launched.replicas > 1 else "fsdp2"
    stage = _zero(runtime).get("stage", 0)
    if launched.strategy == "deepspeed" and stage:
        return f"zero{stage}" + ("_offload" if stage == 3 and _is_offloaded(runtime) else "")
    return "single" if launched.world_size == 1 else "ddp"


def _least(runtime: Runtime, recipe: Recipe, model: nn.Module) -> int:
    """The bytes that a rank of average size keeps at the least."""
    launched = runtime.launched
    if runtime.device.type != "cpu" and _is_offloaded(runtime):
        return 0
    itemsize = next(model.parameters()).element_size()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable = sum(parameter.numel() for parameter in trained)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trainable
    if launched.strategy == "ddp":
        of_states = states.of_shapes(recipe.optim, [tuple(it.shape) for it in trained], itemsize=itemsize)
        return (frozen + 2 * trainable) * itemsize + of_states
    if launched.strategy == "fsdp2":
        shards = launched.world_size // launched.replicas  # a plan for tensor parallelism divides less
        share = trainable // shards
        return (frozen // shards + 2 * share) * itemsize + states.of_shapes(recipe.optim, [(share,)], itemsize=itemsize)
    return _least_of_zero(runtime, recipe, trainable, frozen)


def _least_of_zero(runtime: Runtime, recipe: Recipe, trainable: int, frozen: int) -> int:
    if any(_deepspeed(runtime).get(half, {}).get(f"{half}_master_weights_and_grads") for half in ("bf16", "fp16")):
        return 0  # states of another size
    stage, ranks = _zero(runtime).get("stage", 0), runtime.launched.data_ranks
    width = _WHOLE if runtime.launched.mixed_precision == "no" else 2
    share = trainable // (ranks if stage else 1)
    weights = share + frozen // ranks if stage == 3 else trainable + frozen
    copies = share * _WHOLE if stage in (1, 2) or (stage == 3 and width != _WHOLE) else 0
    return (weights + share) * width + copies + states.of_shapes(recipe.optim, [(share,)])


def _is_offloaded(runtime: Runtime) -> bool:
    """Whether any of it lies in the host's memory."""
    if runtime.launched.strategy == "fsdp2":
        return fsdp2.offloads(runtime.accelerator)
    devices = ((_zero(runtime).get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
    return any(device not in (None, "none") for device in devices)


def _zero(runtime: Runtime) -> dict[str, Any]:
    """DeepSpeed's settings of what is divided; empty: without it."""
    found: dict[str, Any] = _deepspeed(runtime).get("zero_optimization", {})
    return found


def _deepspeed(runtime: Runtime) -> dict[str, Any]:
    plugin = getattr(runtime.accelerator.state, "deepspeed_plugin", None)
    config: dict[str, Any] = plugin.deepspeed_config if plugin else {}
    return config
