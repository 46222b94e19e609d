"""Takes a step under a preset, and saves the model with Accelerate and DCP, and what the ranks really have.

python tests/scripts/saved_elsewhere.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import functional as F

from app.recipe.schema import BatchPlan, OptimRecipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe

RECIPE = ModelRecipe(norm="batch", hidden=15)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.build(RECIPE, channels=1, image_size=(8, 8), num_classes=10)


def main(folder: Path) -> None:
    from app.checkpoints.sharded_state import Shards
    from app.distributed.runtime import Runtime
    from app.environment.launched import read
    from app.optim import parameter_groups

    launched = read(os.environ)
    runtime = Runtime(launched, BatchPlan(global_batch_size=8, data_ranks=launched.world_size, accumulation=1))
    accelerator, whole = runtime.accelerator, build(seed=1)
    whole.norm1.requires_grad_(False)
    whole.conv1.tied = whole.head  # type: ignore[assignment]  # parameters with two names
    optim = OptimRecipe(name="adamw", lr=0.01, groups={"*.bias": {"weight_decay": 0.0}})
    model, optimizer = runtime.prepare(whole, parameter_groups.build_optimizer(optim, whole))
    with accelerator.accumulate(model):
        images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))  # whose statistics are equal
        accelerator.backward(F.cross_entropy(model(images.to(runtime.input_dtype(torch.float32))).float(), torch.arange(4)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "state"))
    if accelerator.state.deepspeed_plugin is None:
        dcp.save({"epoch": 3, "app": {"model": get_model_state_dict(model), "optim": optimizer.state_dict()}},
                 checkpoint_id=folder / "nested")  # fmt: skip
        dcp.save({**get_model_state_dict(model), "optimizer": {"head.weight": torch.zeros(3)}}, checkpoint_id=folder / "flat")
    shards = Shards(accelerator, model, optimizer)
    pieces = [(it.name, it.region, it.values.clone()) for it in shards.owned_pieces() if it.key == "weight"]
    expected = {name: it.clone() for name, it in build(seed=1).state_dict().items()} | shards.buffers()
    for name, region, values in [piece for of_rank in runtime.gather(pieces) for piece in of_rank]:
        region.rows(expected[name.replace("conv1.tied", "head")]).copy_(values.view(region.runs, -1))
    if runtime.is_main:
        save_file(expected, folder / "expected.safetensors")
    runtime.close()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
