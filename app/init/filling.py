"""The model of a task and its initial weights: the same bits under every preset and on any number of processes.

A task that has `init_module` builds its model without memory, and then fills one unit of it after the other (`units`).
The model of one that does not is built whole on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.distributed.runtime import Runtime
from app.errors import PresetError
from app.init import fsdp2, tensor_parallel, zero3
from app.init.held import as_text, digest_of, is_divided
from app.init.units import Units, as_in, block_classes, check_left, listed, places, popped
from app.task import Task, overrides

_LARGE_BYTES = 1e9


def made(task: Task, facts: Mapping[str, Any], *, seed: int) -> tuple[nn.Module, Units | None]:
    """Return the task's model for samples with these facts, and its units: then it is on torch's meta device yet.

    Without units the model is on the CPU, with weights of torch's global generator. Raises RecipeError.
    """
    with zero3.transformers_unaware():
        if not overrides(task, "init_module"):
            return task.model(facts), None
        with torch.device("meta"):
            model = task.model(facts)
        _without_memory(model)
        _tie(model)
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
    """Give the model the units' numbers, in its place, and return their digest, of this rank's own.

    Under FSDP2, ZeRO-3 and tensor parallelism a rank keeps its share of each unit. Raises RecipeError for what the task's
    `init_module` has not filled. Called by all ranks together.
    """
    total = _Total()
    _fill(runtime, model, units, total.add)
    return as_text(total.of_all)


def to_read_into(runtime: Runtime, dtype: torch.dtype, task: Task, facts: Mapping[str, Any]) -> nn.Module:
    """Return the task's model with some weights, for others to be read into, in full precision under every preset.

    Where the preset divides a model that is drawn by units, each rank has its share of it; one of a task without
    `init_module` is whole. Called by all ranks together. Raises PresetError if it cannot be divided as asked.
    """
    model, units = made(task, facts, seed=0)
    if units is not None:
        check(runtime, model)
        with fsdp2.in_full_precision(runtime.accelerator):
            _fill(runtime, model.to(dtype), units, lambda *_: None)
    return model


def divides(runtime: Runtime) -> bool:
    """Whether the preset divides a model that is drawn by units."""
    accelerator, strategy = runtime.accelerator, runtime.launched.strategy
    return (strategy == "fsdp2" and fsdp2.can_divide(accelerator)) or (
        strategy == "deepspeed" and zero3.can_divide(accelerator)
    )


def to_evaluate(runtime: Runtime, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model that was read into, ready to be called in this type on the device of this rank."""
    if not is_divided(model):
        return model.to(device=runtime.device, dtype=dtype)
    gathers_itself = runtime.launched.strategy == "fsdp2"
    prepared: nn.Module = model if gathers_itself else runtime.prepare(model)
    return prepared


def _fill(runtime: Runtime, model: nn.Module, units: Units, note: Callable[[str, Tensor], None]) -> None:
    accelerator, strategy = runtime.accelerator, runtime.launched.strategy
    if runtime.launched.tensor_parallel > 1:
        assert runtime.mesh is not None
        if not fsdp2.can_divide(accelerator):
            raise PresetError(
                "under tensor parallelism a preset must not set fsdp_cpu_ram_efficient_loading or fsdp_ignored_modules, "
                "because the model is sharded before Accelerate prepares it: remove them"
            )
        tensor_parallel.divide(model, runtime.mesh["tp"])
        fsdp2.fill(accelerator, model, units, note, runtime.mesh["dp_shard"])
    elif strategy == "fsdp2" and fsdp2.can_divide(accelerator):
        fsdp2.fill(accelerator, model, units, note)
    elif strategy == "deepspeed" and zero3.can_divide(accelerator):
        zero3.fill(accelerator, model, units, note)
    else:
        _fill_whole(model, units, note)
    check_left(model)


@torch.no_grad()
def _fill_whole(model: nn.Module, units: Units, note: Callable[[str, Tensor], None] = lambda *_: None) -> None:
    """Give a model on torch's meta device its parameters and buffers on the CPU, with the units' numbers.

    What is one tensor in several places stays one: tied embeddings. `note` is called with each tensor, by its name.
    """
    where = places(model)
    for _, drawn in units.drawn():
        for name, values in popped(drawn):
            module, key = where[name][0]
            meta = getattr(module, key)
            real = as_in(meta, values)
            note(name, real)
            if isinstance(meta, nn.Parameter):
                real = nn.Parameter(real, requires_grad=meta.requires_grad)
            for module, key in where[name]:
                setattr(module, key, real)


class _Total:
    """The digests of what was drawn, added up."""

    def __init__(self) -> None:
        self.of_all = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.of_all += digest_of(name, tensor)


def prepare(runtime: Runtime, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return both as `Runtime.prepare` does, where the model may be divided already."""
    if runtime.launched.strategy != "fsdp2":
        return runtime.prepare(model, optimizer)
    divided = is_divided(model)
    parameters = [list(group["params"]) for group in optimizer.param_groups] if divided else []
    with fsdp2.by_layer(runtime.accelerator.state.fsdp_plugin, () if divided else block_classes(task, model)):
        model, prepared = runtime.prepare(model, optimizer)
    if divided:
        # Accelerate tells parameters by the place of their memory, and of some a rank has no rows, and so no memory.
        for group, of_group in zip(prepared.param_groups, parameters, strict=False):
            group["params"] = of_group
    return model, prepared


def whole_model(task: Task, facts: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """Return the task's model, whole on the CPU of this process."""
    model, units = made(task, facts, seed=seed)
    if units is not None:
        _fill_whole(model, units)
        check_left(model)
    return model


def notes(model: nn.Module, units: Units | None) -> list[str]:
    """Return what a person should know of how a model, not prepared yet, was built: a sentence, if it is large."""
    size = sum(it.numel() * it.element_size() for it in (*model.parameters(), *model.buffers()))
    if units is not None or size < _LARGE_BYTES:
        return []
    return [
        (
            f"every process holds the whole model while it is built, {size / 1e9:.1f} GB: a task with `init_module` "
            "draws it part by part (docs/your-own-task.md)"
        )
    ]


def _without_memory(model: nn.Module) -> None:
    """Forget the numbers of buffers that were made on a device by name: `init_module` fills them as all others."""
    for module in model.modules():
        module._buffers.update({key: it if it is None else it.to("meta") for key, it in module._buffers.items()})


def _tie(model: nn.Module) -> None:
    """Have a model of transformers make one tensor of those that are tied, as its own loading does."""
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
