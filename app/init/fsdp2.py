"""Initial weights under FSDP2: the model is sharded before it has memory, and each rank keeps its rows of what is drawn.

It is divided by Accelerate's own function, as `prepare` would divide it, which leaves alone what is divided already (accelerate
1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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
    """Return whether a model can be sharded before `prepare`, which under some presets would first wrap layers or fill them."""
    plugin: Any = accelerator.state.fsdp_plugin
    return not (plugin.cpu_ram_efficient_loading or plugin.ignored_modules)


def offloads(accelerator: Accelerator) -> bool:
    """Whether the shards lie in the host's memory."""
    return isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


@contextmanager
def by_layer(plugin: Any, blocks: Collection[str]) -> Iterator[None]:
    """Where the preset divides by size, have each module of these classes be gathered as one: a model knows its layers best.

    By size, a list of large layers is one too many: torch divides none.
    """
    before = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
    if blocks and getattr(before[0], "func", before[0]) is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, sorted(blocks)
    yield
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = before


@contextmanager
def in_full_precision(accelerator: Accelerator) -> Iterator[None]:
    """Have what is divided inside the block compute in the type that its weights have."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    before, plugin.mixed_precision_policy = plugin.mixed_precision_policy, None
    yield
    plugin.mixed_precision_policy = before


class _Over:
    """An Accelerator as Accelerate's function sees it that divides a model by rows, with a mesh of its own."""

    def __init__(self, accelerator: Accelerator, mesh: DeviceMesh) -> None:
        self.state, self.mixed_precision = accelerator.state, accelerator.mixed_precision
        self.device, self.is_main_process = accelerator.device, accelerator.is_main_process
        self.torch_device_mesh, self.parallelism_config = mesh, self
        self.fsdp_dim_names = mesh.mesh_dim_names


@torch.no_grad()
def fill(
    accelerator: Accelerator,
    model: nn.Module,
    units: Units,
    note: Callable[[str, Tensor], None],
    mesh: DeviceMesh | None = None,
) -> None:
    """Shard a model on torch's meta device over the ranks, and give each rank its rows of the units' weights.

    `note` is called with each whole tensor that was drawn, by its name, in the type that the model has. `mesh` has the ranks
    among whom rows are divided, where Accelerate does not know of it.
    """
    where = places(model)
    plugin = accelerator.state.fsdp_plugin
    with by_layer(plugin, units.blocks):
        fsdp2_prepare_model(accelerator if mesh is None else _Over(accelerator, mesh), model)
    model.to_empty(device="cpu" if offloads(accelerator) else accelerator.device)
    for standing in where.values():
        first, key = standing[0]
        for module, other in standing[1:]:
            setattr(module, other, getattr(first, key))
    model._apply(lambda tensor: tensor)  # torch looks again which tensors stand where
    for _, drawn in units.drawn():
        _keep(where, drawn, note)


def _keep(
    where: Mapping[str, list[tuple[nn.Module, str]]], drawn: dict[str, Tensor], note: Callable[[str, Tensor], None]
) -> None:
    """Copy this rank's share of what was drawn into the model."""
    for name, whole in popped(drawn):
        module, key = where[name][0]
        target: Any = getattr(module, key)
        values = whole.to(target.dtype)
        note(name, values)
        if isinstance(target, DTensor):
            region, local = rows(name, target)
            local.copy_(region.take(values.contiguous()))
        else:
            target.copy_(values)


def rows(name: str, parameter: DTensor) -> tuple[Region, Tensor]:
    """Return which elements of the parameter this rank has, and the elements, 1-D and live.

    Raises PresetError for a parameter that is divided so that they are no `Region`.
    """
    return Region.of(parameter, name), parameter.to_local().detach().view(-1)
