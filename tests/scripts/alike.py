"""Takes steps under tensor parallelism, and shows what each rank then has of the parameters that no group divides.

python tests/scripts/alike.py OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "init"))

STEPS = 5


def main(out: str) -> None:
    import torch
    from drawn_models import Drawn, loss, twelve

    from app.distributed.runtime import Runtime
    from app.environment.launched import read
    from app.init import filling, model_tensors
    from app.optim import parameter_groups
    from app.optim.steps import Steps
    from app.recipe.batching import BatchPlan
    from app.recipe.schema import OptimRecipe

    launched, recipe = read(os.environ), OptimRecipe(lr=0.01)
    ranks = {"data_ranks": launched.data_ranks, "tensor_parallel": launched.tensor_parallel}
    runtime = Runtime(launched, BatchPlan(global_batch_size=2, accumulation=1, **ranks), clip_norm=0.1)
    task: Any = Drawn(twelve)
    model, units = filling.made(task, {}, seed=0)
    assert units
    rule = parameter_groups.Rule.of(recipe, model)
    filling.fill(runtime, model, units)
    model, optimizer = filling.prepare(runtime, task, model, parameter_groups.build_optimizer(recipe, model, rule))
    steps = Steps(runtime.accelerator, model, optimizer, clip_norm=0.1)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(step))
        steps.backward(loss(model, tokens), 1.0)
        norm = steps.take(0.01).grad_norm
        whole = [it for it in model.parameters() if it.device_mesh.ndim == 1]  # type: ignore[union-attr]
        values = torch.cat([it.to_local().detach().view(-1) for it in whole])  # type: ignore[operator]
        found.append(runtime.gather((float(norm), values.numel(), model_tensors.digest_of("", values))))
    if runtime.is_main:
        Path(out).write_text(json.dumps(found))
    runtime.gather(None)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
