"""Optimizers that are prepared under a preset and then tampered with, on the last rank alone: what the check says of each.

Each rank writes into the folder given what was said of each case, by optimizer and case; null where nothing was.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from app.checkpoints.sharded_state import Shards, check_optimizer
from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.errors import PresetError
from app.optim import parameter_groups
from app.recipe.schema import BatchPlan, OptimRecipe

# By optimizer and case: the parameter group, and the setting that is wrong there.
WRONG: dict[str, dict[str, tuple[int, str, Any]]] = {
    "adamw": {"decay": (-1, "weight_decay", 0.5), "rate": (0, "lr", 0.2), "betas": (-1, "betas", (0.5, 0.999))},
    "sgd": {"momentum": (-1, "momentum", 0.0), "nesterov": (-1, "nesterov", True)},
}


def refusal(runtime: Runtime, rule: parameter_groups.Rule, model: Any, optimizer: Any) -> str | None:
    try:
        check_optimizer(runtime, rule, optimizer, Shards(runtime.accelerator, model, optimizer), dtype=torch.float32)
    except PresetError as error:
        return str(error)
    return None


launched = read(os.environ)
count = launched.world_size
is_wrong = launched.rank == count - 1
runtime = Runtime(launched, BatchPlan(global_batch_size=count, data_ranks=count, accumulation=1))
found: dict[str, dict[str, str | None]] = {}
for name, cases in WRONG.items():
    recipe = OptimRecipe(name=name, lr=0.1, weight_decay=0.05)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 3))
    rule = parameter_groups.Rule.of(recipe, layers)
    model, optimizer = runtime.prepare(layers, parameter_groups.build_optimizer(recipe, layers))
    stepper = Shards(runtime.accelerator, model, optimizer).stepper
    found[name] = {"nothing": refusal(runtime, rule, model, optimizer)}
    for case, (group, setting, value) in cases.items():
        settings = stepper.param_groups[group]
        right, settings[setting] = settings[setting], value if is_wrong else settings[setting]
        found[name][case] = refusal(runtime, rule, model, optimizer)
        settings[setting] = right
    if is_wrong:
        other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
        other.param_groups = stepper.param_groups
        holder = optimizer if isinstance(optimizer.optimizer, torch.optim.Optimizer) else optimizer.optimizer
        holder.optimizer = other
    found[name]["class"] = refusal(runtime, rule, model, optimizer)
Path(sys.argv[1], f"{launched.rank}.json").write_text(json.dumps(found))
os._exit(0)
