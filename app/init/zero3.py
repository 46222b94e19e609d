"""Initial weights under ZeRO-3: each unit is sharded as soon as it is drawn.

A parameter is divided by DeepSpeed's own function, as its engine would do it with the whole model, and the engine leaves alone
what is divided already (deepspeed 0.19.8, runtime/zero/parameter_offload.py, `_convert_to_zero_parameters`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from app.init.units import Units, as_in, places, popped


@contextmanager
def transformers_unaware() -> Iterator[None]:
    """Have transformers build models as it does without ZeRO-3.

    Where Accelerate has told it of a config of ZeRO-3, it builds them under `deepspeed.zero.Init`, with other random numbers
    (transformers 5.23, modeling_utils.py, `get_init_context`).
    """
    known: Any = sys.modules.get("transformers.integrations.deepspeed")
    told = getattr(known, "_hf_deepspeed_config_weak_ref", None)
    if told is None:
        yield
        return
    known.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        known._hf_deepspeed_config_weak_ref = told


def can_divide(accelerator: Accelerator) -> bool:
    """Whether the preset is ZeRO-3, with its parameters in memory."""
    zero = _zero(accelerator)
    return zero.get("stage") == 3 and (zero.get("offload_param") or {}).get("device") in (None, "none", "cpu")


@torch.no_grad()
def fill(accelerator: Accelerator, model: nn.Module, units: Units, note: Callable[[str, Tensor], None]) -> None:
    """Give a model on torch's meta device the units' numbers; each rank keeps a flat range of each parameter.

    `note` is called with each whole tensor that was drawn, by its name, in the type that DeepSpeed will have it in.
    """
    import deepspeed

    where = places(model)
    config = _config(accelerator)
    half = next((getattr(torch, kind) for key, kind in _HALVES.items() if config.get(key, {}).get("enabled")), None)
    divided: Any = None
    for _, drawn in units.drawn():
        new = _placed(where, drawn, half, note)
        if divided is not None:
            divided.convert_to_zero_parameters(param_list=list(new))
        elif len(new):
            deepspeed.zero.Init(module=new, config_dict_or_path=config, dtype=half)
            divided = new[0]


def _placed(
    where: Mapping[str, list[tuple[nn.Module, str]]],
    drawn: dict[str, Tensor],
    half: torch.dtype | None,
    note: Callable[[str, Tensor], None],
) -> nn.ParameterList:
    """Put what was drawn into the model; return the parameters, whole yet."""
    new = nn.ParameterList()
    for name, whole in popped(drawn):
        module, key = where[name][0]
        meta = getattr(module, key)
        is_parameter = isinstance(meta, nn.Parameter)
        real = as_in(meta, whole, half if half is not None and is_parameter and meta.is_floating_point() else meta.dtype)
        note(name, real)
        if is_parameter:
            real = nn.Parameter(real, requires_grad=meta.requires_grad)
            new.append(real)
        for place, of_place in where[name]:
            setattr(place, of_place, real)
    return new


def is_divided(tensor: Any) -> bool:
    """Whether DeepSpeed has sharded a parameter; it then has no elements itself."""
    return hasattr(tensor, "ds_tensor")


def flat_range(parameter: Any) -> tuple[tuple[int, ...], int, Tensor]:
    """Return the shape of a divided parameter, where this rank's range of it begins, and the range, 1-D and live.

    What is past the parameter's end is padding.
    """
    values: Tensor = parameter.ds_tensor.data.view(-1)
    return tuple(parameter.ds_shape), values.numel() * parameter.ds_zero_partition_rank, values


_HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def _zero(accelerator: Accelerator) -> dict[str, Any]:
    zero: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return zero


def _config(accelerator: Accelerator) -> dict[str, Any]:
    """What of DeepSpeed's config decides how parameters are divided."""
    precision = accelerator.mixed_precision
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": _said(_zero(accelerator))}
    return config | {key: {"enabled": True} for key in _HALVES if key == precision}


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not left to Accelerate."""
    return {key: _said(value) if isinstance(value, Mapping) else value for key, value in settings.items() if value != "auto"}
