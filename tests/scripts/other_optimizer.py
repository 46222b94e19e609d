"""Optimizers that are prepared under a preset and then tampered with, on the last rank alone: what the check says of each.

Each rank writes into the folder given what was said of each case, by optimizer and case; null where nothing was.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from app.checkpoints.sharded_state import Shards, check_optimizer
from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.errors import PresetError
from app.optim import parameter_groups
from app.recipe.batching import BatchPlan
from app.recipe.schema import OptimRecipe

RECIPES = {
    "adamw": OptimRecipe(name="adamw", lr=0.1, weight_decay=0.05),
    "sgd": OptimRecipe(name="sgd", lr=0.1, weight_decay=0.05),
}


def stepper_of(optimizer: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)
    return found


def put(optimizer: Any, stepper: torch.optim.Optimizer) -> None:
    """Have another optimizer step."""
    holder = optimizer if isinstance(optimizer.optimizer, torch.optim.Optimizer) else optimizer.optimizer
    holder.optimizer = stepper


def another_class(optimizer: Any) -> None:
    stepper = stepper_of(optimizer)
    other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    other.param_groups = stepper.param_groups
    put(optimizer, other)


def setting(name: str, value: Any, *, group: int = -1) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        stepper_of(optimizer).param_groups[group][name] = value

    return change


CASES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda optimizer: None,
    "class": another_class,
    "decay": setting("weight_decay", 0.5),
    "rate": setting("lr", 0.2, group=0),
}
OWN_CASES = {
    "adamw": {"betas": setting("betas", (0.5, 0.999)), "mode": setting("decoupled_weight_decay", False)},
    "sgd": {"momentum": setting("momentum", 0.0), "nesterov": setting("nesterov", True)},
}


def main() -> None:
    launched = read(os.environ)
    count = launched.world_size
    runtime = Runtime(launched, BatchPlan(global_batch_size=count, data_ranks=count, accumulation=1))
    found: dict[str, dict[str, str | None]] = {}
    for name, recipe in RECIPES.items():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 3))
        rule = parameter_groups.Rule.of(recipe, model)
        model, optimizer = runtime.prepare(model, parameter_groups.build_optimizer(recipe, model))
        groups = [{key: copy.copy(value) for key, value in group.items()} for group in stepper_of(optimizer).param_groups]
        stepper, found[name] = stepper_of(optimizer), {}
        for case, change in {**CASES, **OWN_CASES[name]}.items():
            if launched.rank == count - 1:
                change(optimizer)
            found[name][case] = None
            try:
                check_optimizer(runtime, rule, optimizer, Shards(runtime.accelerator, model, optimizer), dtype=torch.float32)
            except PresetError as error:
                found[name][case] = str(error)
            put(optimizer, stepper)
            for group, before in zip(stepper.param_groups, groups, strict=True):
                group.update(before)
    Path(sys.argv[1], f"{launched.rank}.json").write_text(json.dumps(found))
    os._exit(0)


main()
