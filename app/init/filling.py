"""The model of a task and its initial weights: the same bits under every preset and on any number of processes.

A task with `init_module` builds its model without memory, and then fills one unit after the other (`units`), of which each rank
keeps its share. The model of any other task is built whole on every process.

FSDP2: Accelerate's own function shards the model before it has memory, as `prepare` would do, which leaves a sharded model
alone (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`). ZeRO-3: DeepSpeed's own function shards each unit as soon
as it is drawn, and the engine leaves sharded parameters alone (deepspeed 0.19.8, runtime/zero/parameter_offload.py,
`_convert_to_zero_parameters`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
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

from app.distributed import numerics
from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import PresetError
from app.init import tensor_parallel
from app.init.model_tensors import as_text, digest_of, is_sharded
from app.init.region import Region
from app.init.units import Units, block_classes, place, places
from app.task import Task, overrides

Note = Callable[[str, Tensor], None]
"""Called with each whole drawn tensor, by its name, in the type in which the model will have it."""


def made(task: Task, facts: Mapping[str, Any], *, seed: int) -> tuple[nn.Module, Units | None]:
    """Return the task's model for samples with these facts, and its units; with units it is on torch's meta device.

    Without units the model is on the CPU, with weights of torch's global generator. Raises RecipeError.
    """
    with transformers_unaware():
        if not overrides(task, "init_module"):
            return task.model(facts), None
        with torch.device("meta"):
            model = task.model(facts)
        for module in model.modules():  # buffers that were created on a named device: `init_module` fills them like others
            module._buffers.update({key: it if it is None else it.to("meta") for key, it in module._buffers.items()})
        if callable(tie := getattr(model, "tie_weights", None)):  # transformers makes one tensor of tied ones when it loads
            tie()
    return model, Units(task, model, seed=seed)


@contextmanager
def transformers_unaware() -> Iterator[None]:
    """Have transformers build models as it does without ZeRO-3.

    If Accelerate has passed it a ZeRO-3 config, it builds models under `deepspeed.zero.Init`, with other random numbers
    (transformers 5.23, modeling_utils.py, `get_init_context`).
    """
    integration: Any = sys.modules.get("transformers.integrations.deepspeed")
    config = getattr(integration, "_hf_deepspeed_config_weak_ref", None)
    if config is None:
        yield
        return
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = config


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
        if not can_shard(runtime):
            raise PresetError(
                "under tensor parallelism a preset must not set fsdp_cpu_ram_efficient_loading or fsdp_ignored_modules, "
                "because the model is sharded before Accelerate prepares it: remove them"
            )
        tensor_parallel.check(model, launched.tensor_parallel)
    if launched.context_parallel > 1:
        check_sequences(model, launched.context_parallel)


def check_sequences(model: nn.Module, parts: int) -> None:
    """Raise PresetError if a model on torch's meta device cannot compute with parts of sequences (`split_sequences`)."""
    if not (hasattr(model, "split_sequences") and all(parameter.is_meta for parameter in model.parameters())):
        raise PresetError(
            f"context parallelism of {parts} processes needs the task causal_lm, whose models can split each sequence, and the "
            f"model is a {type(model).__name__}: use fsdp2.yaml"
        )


def fill(runtime: Runtime, model: nn.Module, units: Units) -> str:
    """Give the model the units' weights, in its place, and return their digest, as this rank drew them.

    Under FSDP2, ZeRO-3 and tensor parallelism a rank keeps its share of each unit. Raises RecipeError for tensors that the
    task's `init_module` has not filled. Called by all ranks together.
    """
    digests: list[int] = []
    _fill(runtime, model, units, lambda name, tensor: digests.append(digest_of(name, tensor)))
    return as_text(sum(digests))


def whole_model(task: Task, facts: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """Return the task's model, whole on the CPU of this process."""
    model, units = made(task, facts, seed=seed)
    if units is not None:
        _fill_whole(model, units, lambda *_: None)
    return model


def to_read_into(runtime: Runtime, dtype: torch.dtype, task: Task, facts: Mapping[str, Any]) -> nn.Module:
    """Return the task's model, in full precision under every preset, for weights to be read into.

    If the preset shards models that are drawn by units, each rank has its share; the model of a task without `init_module`
    is whole. Called by all ranks together. Raises PresetError if it cannot be sharded as the preset asks.
    """
    model, units = made(task, facts, seed=0)
    if units is not None:
        check(runtime, model)
        no_plugin = SimpleNamespace(mixed_precision_policy=None)
        plugin: Any = getattr(runtime.accelerator.state, "fsdp_plugin", None) or no_plugin
        policy, plugin.mixed_precision_policy = plugin.mixed_precision_policy, None  # to compute in the type of the weights
        _fill(runtime, model.to(dtype), units, lambda *_: None)
        plugin.mixed_precision_policy = policy
    return model


def to_evaluate(runtime: Runtime, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model, after its weights were read, ready to be called in this type on the device of this rank."""
    if not is_sharded(model):
        return model.to(device=runtime.device, dtype=dtype)
    if runtime.launched.strategy == "fsdp2":  # gathers its shards by itself
        return model
    prepared: nn.Module = runtime.prepare(model)
    return prepared


def prepare(runtime: Runtime, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return model and optimizer as `Runtime.prepare` does, also if the model is sharded already."""
    if runtime.launched.strategy != "fsdp2":
        return runtime.prepare(model, optimizer)
    sharded = is_sharded(model)
    parameters = [list(group["params"]) for group in optimizer.param_groups] if sharded else []
    with _wrapped_by_layer(runtime.accelerator, () if sharded else block_classes(task, model)):
        model, prepared = runtime.prepare(model, optimizer)
    if sharded:
        # Accelerate maps parameters by their memory address, but a rank has no rows of some, and so no memory.
        for group, own in zip(prepared.param_groups, parameters, strict=False):
            group["params"] = own
    return model, prepared


def can_shard(runtime: Runtime) -> bool:
    """Return whether the preset shards a model that is drawn by units.

    Not those of FSDP2 under which `prepare` first wraps or fills layers; of DeepSpeed, ZeRO-3.
    """
    state: Any = runtime.accelerator.state
    if runtime.launched.strategy == "fsdp2":
        return not (state.fsdp_plugin.cpu_ram_efficient_loading or state.fsdp_plugin.ignored_modules)
    if runtime.launched.strategy != "deepspeed":
        return False
    return bool(state.deepspeed_plugin.deepspeed_config["zero_optimization"].get("stage") == 3)


def offloads(accelerator: Accelerator) -> bool:
    """Return whether FSDP2 keeps the shards in the host's memory."""
    return isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


def _fill(runtime: Runtime, model: Any, units: Units, note: Note) -> None:
    if runtime.launched.context_parallel > 1:
        assert runtime.mesh is not None
        model.split_sequences(runtime.mesh["cp"])
    if not can_shard(runtime):
        _fill_whole(model, units, note)
    elif runtime.launched.strategy == "deepspeed":
        _fill_zero3(runtime.accelerator, model, units, note)
    elif runtime.launched.tensor_parallel > 1:
        assert runtime.mesh is not None
        tensor_parallel.divide(model, runtime.mesh["tp"])
        _fill_fsdp2(runtime.accelerator, model, units, note, runtime.mesh["dp_shard"])
    else:
        _fill_fsdp2(runtime.accelerator, model, units, note)


@torch.no_grad()
def _fill_whole(model: nn.Module, units: Units, note: Note) -> None:
    where = places(model)
    for _, drawn in units.drawn():
        place(where, drawn, note)


@torch.no_grad()
def _fill_zero3(accelerator: Accelerator, model: nn.Module, units: Units, note: Note) -> None:
    """Give a model on torch's meta device the units' weights; each rank keeps a flat range of each parameter."""
    import deepspeed

    where, precision = places(model), accelerator.mixed_precision
    half = numerics.HALF.get(precision)
    config: dict[str, Any] = {  # the settings that decide how parameters are sharded
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": _without_auto(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]),
        **({} if half is None else {precision: {"enabled": True}}),
    }
    sharded: Any = None
    for _, drawn in units.drawn():
        parameters = place(where, drawn, note, half)
        if sharded is not None:
            sharded.convert_to_zero_parameters(param_list=parameters)
        elif parameters:
            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=config, dtype=half)
            sharded = parameters[0]


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose value is not left to Accelerate."""
    return {key: _without_auto(it) if isinstance(it, Mapping) else it for key, it in settings.items() if it != "auto"}


@torch.no_grad()
def _fill_fsdp2(accelerator: Accelerator, model: nn.Module, units: Units, note: Note, mesh: DeviceMesh | None = None) -> None:
    """Shard a model on torch's meta device over the ranks, and give each rank its rows of the units' weights.

    `mesh` has the ranks that share the rows, under tensor parallelism, which Accelerate does not know of.
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
    with _wrapped_by_layer(accelerator, units.blocks):
        fsdp2_prepare_model(sharder, model)
    model.to_empty(device="cpu" if offloads(accelerator) else accelerator.device)
    for (first, key), *others in where.values():
        for module, other in others:
            setattr(module, other, getattr(first, key))
    model._apply(lambda tensor: tensor)  # FSDP2 then looks up the parameters of its modules again
    for _, drawn in units.drawn():
        for name in list(drawn):  # each tensor is forgotten as soon as it is in its place
            whole = drawn.pop(name)
            module, key = where[name][0]
            target: Any = getattr(module, key)
            values = whole.to(target.dtype)
            note(name, values)
            if isinstance(target, DTensor):
                target.to_local().view(-1).copy_(Region.of(target, name).take(values.contiguous()))
            else:
                target.copy_(values)


@contextmanager
def _wrapped_by_layer(accelerator: Accelerator, blocks: Collection[str]) -> Iterator[None]:
    """If the preset wraps by size, wrap each module of these classes instead inside the block.

    By size, a list of large layers would be wrapped as well, which torch refuses.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    before = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
    if blocks and getattr(before[0], "func", before[0]) is size_based_auto_wrap_policy:
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, sorted(blocks)
    yield
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = before
