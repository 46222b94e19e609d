"""Checks that the optimizer that steps is the recipe's: `prepare` may have replaced it.

Accelerate exchanges optimizers for DeepSpeed's under some configs, and DeepSpeed wraps, regroups and flattens what it gets:
so the optimizer that steps in the end is looked at, inside all that is around it, by what it is, by its settings for each
parameter, and by the precision that it steps in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from app.checkpoints.shards import Shards, Stepped
from app.errors import PresetError
from app.optim.from_recipe import Rule
from app.ranks.runtime import Runtime

_SHOWN = 3
"""Differences that a message names."""
_REMEDY = "Try an unchanged preset of accelerate_configs/."


def check_optimizer(runtime: Runtime, rule: Rule, optimizer: Any, shards: Shards, *, dtype: torch.dtype) -> None:
    """Check that the optimizer that steps is that of `rule`, with weights and states of `dtype`, and steps on each parameter
    once.

    `optimizer` is as `prepare` returned it, before its first step, `shards` are of the same. Called by all ranks together.
    Raises PresetError on all of them, which says what differs.
    """
    with runtime.together():
        stepper, stepped = shards.stepper, shards.stepped()
        if type(stepper) is not rule.kind:
            asked, found = _called(rule.kind), _described(stepper)
            raise PresetError(f"the recipe's optimizer is {asked} (optim.name), but {found} would be used. {_REMEDY}")
        differences = [*_detached(optimizer, stepper), *(it for one in stepped for it in _differences(one, rule, dtype))]
        if differences:
            shown = "; ".join(differences[:_SHOWN])
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise PresetError(f"the prepared optimizer differs from the recipe's: {shown}{more}. {_REMEDY}")
    _check_each_is_stepped_once(runtime, rule, stepped)


def _detached(optimizer: Any, stepper: torch.optim.Optimizer) -> Iterator[str]:
    given, used = optimizer.param_groups, stepper.param_groups
    if [id(group) for group in given] != [id(group) for group in used]:
        yield f"learning rates are set on {len(given)} parameter groups, but {len(used)} other groups would be used"


def _differences(stepped: Stepped, rule: Rule, dtype: torch.dtype) -> Iterator[str]:
    if not stepped.settings:
        yield f"no optimizer updates {stepped.name}"
        return
    factor = rule.lr_factors.get(stepped.name, 1.0)
    decay = rule.weight_decays.get(stepped.name, "nothing, because it is not trained")
    wanted = {**rule.settings, "lr": rule.settings["lr"] * factor, "lr_factor": factor, "weight_decay": decay}
    for setting, value in wanted.items():
        found = stepped.settings.get(setting, "not set")
        if found != value:
            yield f"{setting} of {stepped.name} is {found}, not {value}"
    for what, tensor in {"the weights": stepped.values, **stepped.states}.items():
        if tensor.dtype != dtype:
            yield f"{what} of {stepped.name} are {tensor.dtype}, not {dtype}"


def _check_each_is_stepped_once(runtime: Runtime, rule: Rule, stepped: list[Stepped]) -> None:
    places = {name: place for place, name in enumerate(rule.sizes)}
    counts = torch.zeros(len(places), dtype=torch.int64)
    for one in stepped:
        counts[places[one.name]] += one.count
    found = runtime.accelerator.reduce(counts.to(runtime.device), "sum").tolist()
    wrong = [
        f"{count} elements of {name} instead of {size}"
        for (name, size), count in zip(rule.sizes.items(), found, strict=True)
        if count != size
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more parameters" if len(wrong) > _SHOWN else ""
        raise PresetError(
            f"the {runtime.launched.world_size} processes would not update each parameter once: together they "
            f"update {', '.join(wrong[:_SHOWN])}{more}. {_REMEDY}"
        )


def _called(kind: type) -> str:
    return f"{kind.__module__.split('.')[0]}'s {kind.__name__}"


def _described(stepper: torch.optim.Optimizer) -> str:
    """The class of an optimizer, with the modes that DeepSpeed's keep beside their settings."""
    modes = [f"{name} {getattr(stepper, name)}" for name in ("adam_w_mode", "fp32_optimizer_states") if hasattr(stepper, name)]
    return f"{_called(type(stepper))} ({', '.join(modes)})" if modes else _called(type(stepper))
