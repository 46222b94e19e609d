"""Tensor parallelism: the processes of a group split each large matrix, by the model's own plan.

Plan (`tp_plan`, by names of modules) and forward passes of the layers are those of transformers (5.23,
distributed/tensor_parallel.py); a user's model can have a plan in the same form. Modules that it does not name, such as
embeddings and norms, are whole and alike on every process of a group. FSDP2 then shards each process's part by rows.

A module with a true `divides_itself` has its parameters split, and computes with its part itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from app.distributed import sample_dropout
from app.environment.topology import listed
from app.errors import PresetError

_COLUMNS, _ROWS = 1, 0
DIVIDED = {
    **dict.fromkeys(("embedding_rowwise", "colwise", "colwise_gather_output", "colwise_rep"), _ROWS),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), _COLUMNS),
}
"""The dimension of a weight [outputs, inputs] that a rule of a plan splits."""
_SUMMED = "replicated_with_grad_allreduce"
"""Rule for whole parameters whose gradient is the sum over the processes."""
_WHOLE_AGAIN = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
"""Rules of layers with whole inputs and outputs: such a layer can stay whole itself."""
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check(model: nn.Module, parts: int) -> None:
    """Raise PresetError if a model on torch's meta device cannot be split into this number of parts."""
    asked, kind = f"tensor parallelism of {parts} processes", type(model).__name__
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise PresetError(f"{asked} needs a task that draws weights part by part (`init_module`): use fsdp2.yaml")
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    rules, known = set(plan.values()), {*DIVIDED, _SUMMED}
    if not rules <= known or not rules & {*DIVIDED} - {*_WHOLE_AGAIN}:
        raise PresetError(
            f"{asked} needs a model with a tensor parallel plan (transformers' tp_plan) of {', '.join(sorted(known))}, and "
            f"{kind} has {', '.join(sorted(rules)) or 'none'}: use fsdp2.yaml, which shards any model"
        )
    sizes = {what: size for what in _HEADS if (size := getattr(getattr(model, "config", None), what, None))}
    for name, rule in rules_of(model, parts).items():
        module, (holder, _, kind_of_layer) = model.get_submodule(name), name.rpartition(".")
        more = [key for key, _ in module.named_parameters() if key not in ("weight", "bias")]
        if more or (rule in DIVIDED and not isinstance(module, (nn.Linear, nn.Embedding))):
            raise PresetError(
                f"{asked} cannot split {name}, a {type(module).__name__}{f' with {more[0]}' if more else ''}: a "
                "split layer must be a plain torch layer, without LoRA adapters. Use fsdp2.yaml"
            )
        if rule == _SUMMED or rule in _WHOLE_AGAIN:
            continue
        for key, layer in model.get_submodule(holder).named_children():
            if sample_dropout.rate(layer) > 0:
                raise PresetError(
                    f"{asked} cannot use dropout in {holder}.{key}, because like {name} it may see only a part "
                    "of each sample. Set that dropout to 0, or use fsdp2.yaml"
                )
        weight: Any = module.weight
        sizes[f"{'inputs' if DIVIDED[rule] else 'outputs'} of {kind_of_layer}"] = weight.shape[DIVIDED[rule]]
    if wrong := [f"{what} {size}" for what, size in sizes.items() if size % parts]:
        most = math.gcd(*sizes.values())
        raise PresetError(f"{asked} cannot split {listed(wrong, 3)} evenly: --tensor-parallel must divide {most} for {kind}")


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model, which has passed `check`, over the processes of a mesh of one dimension, by its plan."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    divided: dict[int, Any] = {}
    for name, rule in rules_of(model, mesh.size()).items():
        module = model.get_submodule(name)
        if rule == _SUMMED:
            _sum_gradients(module, mesh)
            continue
        style: Any = ALL_PARALLEL_STYLES[rule]
        for key, whole in list(module._parameters.items()):
            if id(whole) not in divided:
                style.shard_param(module, key, mesh)
                divided[id(whole)] = module._parameters[key]
            module._parameters[key] = divided[id(whole)]  # tied parameters stay one
        if not getattr(module, "divides_itself", False):
            style.install_forward(module, mesh)


def rules_of(model: nn.Module, parts: int) -> dict[str, str]:
    """Return the rule of each module that has one.

    Layers with whole inputs and outputs stay whole if their weights cannot be split evenly, or are tied to another layer's
    that has no such rule.
    """
    plan: Mapping[str, str] = model.tp_plan  # type: ignore[assignment]
    found: dict[str, str] = {}
    may_divide: dict[int, bool] = {}
    for name, module in model.named_modules():
        rule = plan.get(".".join("*" if part.isdecimal() else part for part in name.split(".")))
        if rule is not None:
            found[name] = rule
        for tensor in module._parameters.values():
            if tensor is None:
                continue
            is_even = rule in _WHOLE_AGAIN and tensor.shape[0] % parts == 0
            may_divide[id(tensor)] = is_even and may_divide.get(id(tensor), True)
    return {
        name: rule
        for name, rule in found.items()
        if rule not in _WHOLE_AGAIN or all(may_divide[id(it)] for it in model.get_submodule(name).parameters(recurse=False))
    }


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have the gradients of a module's parameters, which each process computes for its own heads, summed over the processes.

    transformers sums a parameter's gradient after each pass, and so sums it repeatedly in a step of several passes.
    """
    forward = module.forward
    hooked: dict[str, Tensor] = {}

    def total(gradient: Tensor) -> Tensor:
        summed: Tensor = DTensor.from_local(gradient, mesh, [Partial()], run_check=False).full_tensor()
        return summed

    def hooking_forward(*args: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            for key, parameter in module._parameters.items():  # under FSDP2 the gathered ones, which replace its shards
                if parameter is not None and parameter.requires_grad and hooked.get(key) is not parameter:
                    parameter.register_hook(total)
                    hooked[key] = parameter
        return forward(*args, **named)

    module.forward = hooking_forward
