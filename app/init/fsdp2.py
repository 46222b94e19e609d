"""Initial weights under FSDP2: the model is sharded before it has memory, and each rank keeps its rows of the drawn tensors.

Accelerate's own function shards it, as `prepare` would do, which leaves a sharded model alone (accelerate 1.15,
utils/fsdp_utils.py, `fsdp2_prepare_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from app.init.region import Region
from app.init.units import Units, places, popped


def can_divide(accelerator: Accelerator) -> bool:
    """Return whether a model can be sharded before `prepare`, which under some presets would first wrap or fill layers."""
    plugin: Any = accelerator.state.fsdp_plugin
    return not (plugin.cpu_ram_efficient_loading or plugin.ignored_modules)


def offloads(accelerator: Accelerator) -> bool:
    """Return whether the shards are kept in the host's memory."""
    return isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


@contextmanager
def by_layer(plugin: Any, blocks: Collection[str]) -> Iterator[None]:
    """If the preset wraps by size, wrap each module of these classes instead inside the block.

    By size, a list of large layers would be wrapped as well, which torch refuses.
    """
    before = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
    if blocks and getattr(before[0], "func", before[0]) is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, sorted(blocks)
    yield
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = before


@contextmanager
def in_full_precision(accelerator: Accelerator) -> Iterator[None]:
    """Have models that are sharded inside the block compute in the type of their weights."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    before, plugin.mixed_precision_policy = plugin.mixed_precision_policy, None
    yield
    plugin.mixed_precision_policy = before


@torch.no_grad()
def fill(
    accelerator: Accelerator,
    model: nn.Module,
    units: Units,
    note: Callable[[str, Tensor], None],
    mesh: DeviceMesh | None = None,
) -> None:
    """Shard a model on torch's meta device over the ranks, and give each rank its rows of the units' weights.

    `note` is called with each whole drawn tensor, by its name, in the model's type. `mesh` has the ranks that share the rows,
    under tensor parallelism, which Accelerate does not know of.
    """
    where = places(model)
    sharder: Any = accelerator
    if mesh is not None:  # the attributes that Accelerate's function reads
        sharder = SimpleNamespace(
            state=accelerator.state,
            mixed_precision=accelerator.mixed_precision,
            device=accelerator.device,
            is_main_process=accelerator.is_main_process,
            torch_device_mesh=mesh,
            parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        )
    with by_layer(accelerator.state.fsdp_plugin, units.blocks):
        fsdp2_prepare_model(sharder, model)
    model.to_empty(device="cpu" if offloads(accelerator) else accelerator.device)
    for (first, key), *others in where.values():
        for module, other in others:
            setattr(module, other, getattr(first, key))
    model._apply(lambda tensor: tensor)  # FSDP2 then looks up the parameters of its modules again
    for _, drawn in units.drawn():
        for name, whole in popped(drawn):
            module, key = where[name][0]
            target: Any = getattr(module, key)
            values = whole.to(target.dtype)
            note(name, values)
            if isinstance(target, DTensor):
                target.to_local().view(-1).copy_(Region.of(target, name).take(values.contiguous()))
            else:
                target.copy_(values)
