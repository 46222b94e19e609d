"""The model of a task and its initial weights: the same bits under every preset and on any number of processes.

A task with `init_module` builds its model without memory, and then fills one unit after the other (`units`).
The model of any other task is built whole on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import PresetError
from app.init import fsdp2, tensor_parallel, zero3
from app.init.held import as_text, digest_of, is_divided
from app.init.units import Units, block_classes, check_left, place, places
from app.task import Task, overrides

_LARGE_BYTES = 1e9


def made(task: Task, facts: Mapping[str, Any], *, seed: int) -> tuple[nn.Module, Units | None]:
    """Return the task's model for samples with these facts, and its units; with units it is on torch's meta device.

    Without units the model is on the CPU, with weights of torch's global generator. Raises RecipeError.
    """
    with zero3.transformers_unaware():
        if not overrides(task, "init_module"):
            return task.model(facts), None
        with torch.device("meta"):
            model = task.model(facts)
        for module in model.modules():  # buffers that were created on a named device: `init_module` fills them like others
            module._buffers.update({key: it if it is None else it.to("meta") for key, it in module._buffers.items()})
        if callable(tie := getattr(model, "tie_weights", None)):  # transformers makes one tensor of tied ones when it loads
            tie()
    return model, Units(task, model, seed=seed)


def check(runtime: Runtime, model: nn.Module) -> None:
    """Raise PresetError if the model, which has no memory yet or is whole, cannot be sharded as the preset asks."""
    launched = runtime.launched
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars and launched.strategy != "ddp":
        raise PresetError(
            f"{listed(scalars)} of the model has no dimensions, and FSDP2 and DeepSpeed do not train such parameters: make it "
            "a vector of one element in the task's model, as in nn.Parameter(torch.zeros(1)), or use multi_gpu.yaml"
        )
    if launched.tensor_parallel > 1:
        tensor_parallel.check(model, launched.tensor_parallel)


def fill(runtime: Runtime, model: nn.Module, units: Units) -> str:
    """Give the model the units' weights, in its place, and return their digest, as this rank drew them.

    Under FSDP2, ZeRO-3 and tensor parallelism a rank keeps its share of each unit. Raises RecipeError for tensors that the
    task's `init_module` has not filled. Called by all ranks together.
    """
    digests: list[int] = []
    _fill(runtime, model, units, lambda name, tensor: digests.append(digest_of(name, tensor)))
    return as_text(sum(digests))


def to_read_into(runtime: Runtime, dtype: torch.dtype, task: Task, facts: Mapping[str, Any]) -> nn.Module:
    """Return the task's model, in full precision under every preset, for weights to be read into.

    If the preset shards models that are drawn by units, each rank has its share; the model of a task without `init_module`
    is whole. Called by all ranks together. Raises PresetError if it cannot be sharded as the preset asks.
    """
    model, units = made(task, facts, seed=0)
    if units is not None:
        check(runtime, model)
        with fsdp2.in_full_precision(runtime.accelerator):
            _fill(runtime, model.to(dtype), units, lambda *_: None)
    return model


def divides(runtime: Runtime) -> bool:
    """Return whether the preset shards a model that is drawn by units."""
    can_divide = {"fsdp2": fsdp2.can_divide, "deepspeed": zero3.can_divide}.get(runtime.launched.strategy)
    return can_divide is not None and can_divide(runtime.accelerator)


def to_evaluate(runtime: Runtime, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model, after its weights were read, ready to be called in this type on the device of this rank."""
    if not is_divided(model):
        return model.to(device=runtime.device, dtype=dtype)
    if runtime.launched.strategy == "fsdp2":  # gathers its shards by itself
        return model
    prepared: nn.Module = runtime.prepare(model)
    return prepared


def _fill(runtime: Runtime, model: nn.Module, units: Units, note: Callable[[str, Tensor], None]) -> None:
    accelerator, has_parts = runtime.accelerator, runtime.launched.tensor_parallel > 1
    if not divides(runtime):
        if has_parts:
            raise PresetError(
                "under tensor parallelism a preset must not set fsdp_cpu_ram_efficient_loading or fsdp_ignored_modules, "
                "because the model is sharded before Accelerate prepares it: remove them"
            )
        _fill_whole(model, units, note)
    elif runtime.launched.strategy == "deepspeed":
        zero3.fill(accelerator, model, units, note)
    elif has_parts:
        assert runtime.mesh is not None
        tensor_parallel.divide(model, runtime.mesh["tp"])
        fsdp2.fill(accelerator, model, units, note, runtime.mesh["dp_shard"])
    else:
        fsdp2.fill(accelerator, model, units, note)
    check_left(model)


@torch.no_grad()
def _fill_whole(model: nn.Module, units: Units, note: Callable[[str, Tensor], None] = lambda *_: None) -> None:
    where = places(model)
    for _, drawn in units.drawn():
        place(where, drawn, note)


def prepare(runtime: Runtime, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return model and optimizer as `Runtime.prepare` does, also if the model is sharded already."""
    if runtime.launched.strategy != "fsdp2":
        return runtime.prepare(model, optimizer)
    divided = is_divided(model)
    parameters = [list(group["params"]) for group in optimizer.param_groups] if divided else []
    with fsdp2.by_layer(runtime.accelerator.state.fsdp_plugin, () if divided else block_classes(task, model)):
        model, prepared = runtime.prepare(model, optimizer)
    if divided:
        # Accelerate maps parameters by their memory address, but a rank has no rows of some, and so no memory.
        for group, own in zip(prepared.param_groups, parameters, strict=False):
            group["params"] = own
    return model, prepared


def whole_model(task: Task, facts: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """Return the task's model, whole on the CPU of this process."""
    model, units = made(task, facts, seed=seed)
    if units is not None:
        _fill_whole(model, units)
        check_left(model)
    return model


def notes(model: nn.Module, units: Units | None) -> list[str]:
    """Return a note for the user if every process holds the whole of a large model, which is not prepared yet."""
    size = sum(it.numel() * it.element_size() for it in (*model.parameters(), *model.buffers()))
    if units is not None or size < _LARGE_BYTES:
        return []
    how = f"every process holds the whole model while it is built, {size / 1e9:.1f} GB"
    return [f"{how}: a task with `init_module` draws it part by part (docs/your-own-task.md)"]
