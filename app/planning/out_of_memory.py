"""Too little memory: a run that can never fit is refused before its model is filled, and one that runs out of it ends with
what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from app.distributed.runtime import Runtime
from app.environment import host
from app.environment.launched import Sharding
from app.errors import LackOfMemoryError
from app.init import filling
from app.planning.devices import GIB
from app.planning.memory import bytes_of_states
from app.recipe.schema import Recipe

_MOST = 6 * 8
"""Bytes that weight, gradient, copy and the states of any optimizer take at most for one element, in float64."""
_WHOLE = 4
"""Bytes of a number that DeepSpeed steps on."""
_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of torch's errors that have no class of their own: the CPU's allocator, and CUDA and cuBLAS outside of torch's."""


def check(runtime: Runtime, recipe: Recipe, model: nn.Module) -> None:
    """Raise LackOfMemoryError if weights, gradients and optimizer state need more than all memory of the device or machine.

    `model` has no memory yet, and is whole. Counted is the least that an average rank needs, so that nothing is refused that
    might run: memory that others use now can be free later. What is offloaded from a GPU is not counted.
    """
    device, launched = runtime.device, runtime.launched
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory, processes, where = properties.total_memory, 1, f"on {device} ({properties.name})"
    elif device.type == "cpu" and (limit := host.find()) is not None:
        memory, processes = limit.limit, launched.local_world_size
        where = f"here for {processes} process{'es' * (processes > 1)} ({limit.origin})"
    else:
        return
    if _MOST * sum(parameter.numel() for parameter in model.parameters()) * processes <= memory:
        return
    if (needed := _least(runtime, recipe, model) * processes) > memory:
        remedy = _sharding(runtime).remedy(launched.world_size, on_cpu=device.type == "cpu")
        raise LackOfMemoryError(
            f"weights, gradients and optimizer state alone take {needed / GIB:,.1f} GiB, and there are {memory / GIB:,.1f} "
            f"GiB {where}: no batch is small enough. Take {remedy}, or a smaller model"
        )


@contextmanager
def out_of_memory_explained(runtime: Runtime, recipe: Recipe) -> Iterator[None]:
    """Raise LackOfMemoryError, with what to change, for an allocation that fails in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(text in str(error) for text in _TEXTS):
            raise
        change = _sharding(runtime).what_to_change(
            runtime.launched.world_size,
            micro_batch=runtime.plan.micro_batch,
            checkpoint_activations=recipe.train.checkpoint_activations,
            on_cpu=runtime.device.type == "cpu",
        )
        raise LackOfMemoryError(f"{runtime.device} is out of memory ({type(error).__name__}: {error}). {change}") from error


def _sharding(runtime: Runtime) -> Sharding:
    launched, zero = runtime.launched, _deepspeed(runtime).get("zero_optimization", {})
    if launched.strategy == "fsdp2":
        offload = filling.offloads(runtime.accelerator)
    else:
        devices = ((zero.get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
        offload = any(device not in (None, "none") for device in devices)
    return Sharding(launched.strategy, zero.get("stage", 0), offload, launched.replicas, launched.tensor_parallel)


def _deepspeed(runtime: Runtime) -> dict[str, Any]:
    plugin = getattr(runtime.accelerator.state, "deepspeed_plugin", None)
    return plugin.deepspeed_config if plugin else {}


def _least(runtime: Runtime, recipe: Recipe, model: nn.Module) -> int:
    """Return the least bytes that an average rank keeps; a plan for tensor parallelism shards less."""
    launched, sharding, config = runtime.launched, _sharding(runtime), _deepspeed(runtime)
    has_other_states = any(config.get(half, {}).get(f"{half}_master_weights_and_grads") for half in ("bf16", "fp16"))
    if has_other_states or (sharding.offload and runtime.device.type != "cpu"):
        return 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable, whole = (sum(it.numel() for it in parameters) for parameters in (trained, model.parameters()))
    itemsize, is_deepspeed = next(model.parameters()).element_size(), sharding.kind == "deepspeed"
    states = bytes_of_states(recipe.optim, [tuple(it.shape) for it in trained], itemsize=_WHOLE if is_deepspeed else itemsize)
    width = itemsize if not is_deepspeed else _WHOLE if launched.mixed_precision == "no" else 2
    has_copies = sharding.stage in (1, 2) or (sharding.stage == 3 and width != _WHOLE)
    of_state = trainable * (width + _WHOLE * has_copies) + states  # with gradients
    shards = launched.world_size // launched.replicas if sharding.kind == "fsdp2" or sharding.stage else 1
    return whole * width // (1 if sharding.stage in (1, 2) else shards) + of_state // shards
