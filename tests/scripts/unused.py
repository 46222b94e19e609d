"""A step of a model that leaves two of its trainable parameters unused, and a frozen one: what is said of it.

accelerate launch ... tests/scripts/unused.py
"""

from __future__ import annotations

import os
from typing import Any

import torch

from app.checkpoints.sharded_state import unwrapped
from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.errors import TrainingError, leave_with
from app.optim import parameter_groups
from app.optim.steps import FirstGradients, Steps
from app.recipe.schema import BatchPlan, Recipe, TrainRecipe


class Forgetful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (torch.nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.used(inputs)


recipe = Recipe(train=TrainRecipe(global_batch_size=8, max_micro_batch=2, steps=1))
launched = read(os.environ)
runtime = Runtime(launched, BatchPlan.of(recipe, launched.world_size))
torch.manual_seed(0)
module = Forgetful()
model, optimizer = runtime.prepare(module, parameter_groups.build_optimizer(recipe.optim, module))
first = FirstGradients(unwrapped(model), runtime.together)
steps = Steps(runtime.accelerator, model, optimizer, clip_norm=None, before_first=first.check)
try:
    for _ in range(runtime.plan.accumulation):
        with steps.micro_batch():
            steps.backward(model(torch.ones(2, 4, device=runtime.device)).square().mean(), 1 / runtime.plan.accumulation)
    steps.take(0.01)
except TrainingError as error:
    leave_with(error, launched.rank)
