"""A run that is out of memory ends with what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from app.distributed.runtime import Runtime
from app.environment.launched import Sharding
from app.errors import LackOfMemoryError
from app.init import filling
from app.recipe.schema import Recipe

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
        change = _sharding(runtime).what_to_change(
            runtime.launched.world_size,
            micro_batch=runtime.plan.micro_batch,
            checkpoint_activations=recipe.train.checkpoint_activations,
            on_cpu=runtime.device.type == "cpu",
        )
        raise LackOfMemoryError(f"{runtime.device} is out of memory ({type(error).__name__}: {error}). {change}") from error


def _sharding(runtime: Runtime) -> Sharding:
    launched, plugin = runtime.launched, getattr(runtime.accelerator.state, "deepspeed_plugin", None)
    zero = plugin.deepspeed_config.get("zero_optimization", {}) if plugin else {}
    if launched.strategy == "fsdp2":
        offload = filling.offloads(runtime.accelerator)
    else:
        devices = ((zero.get(f"offload_{what}") or {}).get("device") for what in ("optimizer", "param"))
        offload = any(device not in (None, "none") for device in devices)
    return Sharding(launched.strategy, zero.get("stage", 0), offload, launched.replicas, launched.tensor_parallel)
