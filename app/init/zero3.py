"""Initial weights under ZeRO-3: each unit is sharded as soon as it is drawn.

DeepSpeed's own function shards each parameter, as its engine would do for the whole model, and the engine leaves sharded
parameters alone (deepspeed 0.19.8, runtime/zero/parameter_offload.py, `_convert_to_zero_parameters`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from app.init.units import Units, place, places

_HALVES = {"bf16": "bfloat16", "fp16": "float16"}


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


def can_divide(accelerator: Accelerator) -> bool:
    """Return whether the preset is ZeRO-3 with parameters in memory."""
    zero: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return zero.get("stage") == 3 and (zero.get("offload_param") or {}).get("device") in (None, "none", "cpu")


@torch.no_grad()
def fill(accelerator: Accelerator, model: nn.Module, units: Units, note: Callable[[str, Tensor], None]) -> None:
    """Give a model on torch's meta device the units' weights; each rank keeps a flat range of each parameter.

    `note` is called with each whole drawn tensor, by its name, in the type that DeepSpeed will have it in.
    """
    import deepspeed

    where, precision = places(model), accelerator.mixed_precision
    half = getattr(torch, _HALVES[precision]) if precision in _HALVES else None
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


def is_divided(tensor: Any) -> bool:
    """Return whether DeepSpeed has sharded a parameter, which then has no elements itself."""
    return hasattr(tensor, "ds_tensor")


def flat_range(parameter: Any) -> tuple[tuple[int, ...], int, Tensor]:
    """Return the shape of a sharded parameter, the start of this rank's range of it, and the range, 1-D and live.

    Elements past the parameter's end are padding.
    """
    values: Tensor = parameter.ds_tensor.data.view(-1)
    return tuple(parameter.ds_shape), values.numel() * parameter.ds_zero_partition_rank, values
