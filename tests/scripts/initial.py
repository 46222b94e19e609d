"""Fills models of a task with `init` under a preset, and shows what the ranks hold of them, before and after they are prepared.

    python tests/scripts/initial.py OUT.json KIND,...

Under tensor parallelism it takes some steps as well, and shows what each rank then has of the parameters that no group divides.

KIND: llama, gpt2, twelve and twelve_tied are drawn by units; plain is built whole by transformers' own `from_config`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 5
sys.path.append(str(Path(__file__).parents[1] / "init"))


def main(out: str, kinds: list[str]) -> None:
    from app.distributed.runtime import Runtime
    from app.environment.launched import read
    from app.recipe.schema import BatchPlan

    launched = read(os.environ)
    runtime = Runtime(launched, BatchPlan(global_batch_size=12, data_ranks=launched.world_size, accumulation=1))
    found = {kind: look(runtime, kind) for kind in kinds}
    if runtime.is_main:
        Path(out).write_text(json.dumps(found))
    runtime.gather(None)
    os._exit(0)


def look(runtime: Any, kind: str) -> dict[str, Any]:
    import torch
    from drawn_models import Drawn, Plain, gpt2, llama, loss, twelve

    from app.checkpoints.sharded_state import Shards
    from app.init import filling, model_tensors
    from app.optim import parameter_groups
    from app.optim.steps import Steps
    from app.recipe.schema import OptimRecipe

    kinds = {"llama": llama, "gpt2": gpt2, "twelve": twelve, "twelve_tied": functools.partial(twelve, tie_word_embeddings=True)}
    recipe = OptimRecipe()
    task: Any = Plain() if kind == "plain" else Drawn(kinds[kind])
    runtime.seed(0)
    model, units = filling.made(task, {}, seed=0)
    rule = parameter_groups.Rule.of(recipe, model)
    drawn = filling.fill(runtime, model, units) if units else None
    shares = runtime.gather(
        sum(it.values.numel() for it in {*model_tensors.local_pieces(model).values()} if it.key == "weight")
    )
    buffers = {name: buffer.sum().item() for name, buffer in model.named_buffers()}
    found = {
        "drawn": runtime.gather(drawn),
        "held": model_tensors.digest(model, runtime.gather),
        "shares": shares,
        "whole": sum(rule.sizes.values()),
        "buffers": runtime.gather(buffers),
    }
    prepared = filling.prepare(runtime, task, model, parameter_groups.build_optimizer(recipe, model, rule))
    shards = Shards(runtime.accelerator, *prepared)
    ranks = runtime.gather(sum(model_tensors.digest_of(it.name, it.values, it.region) for it in shards.owned_pieces()))
    found["prepared"] = model_tensors.as_text(sum(ranks))
    found["names"] = len(dict(shards.model.named_parameters()))
    if runtime.launched.tensor_parallel > 1:
        steps, states = Steps(runtime.accelerator, *prepared, clip_norm=0.1), []
        for step in range(STEPS):
            tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(step))
            steps.backward(loss(prepared[0], tokens), 1.0)
            norm = float(steps.take(0.01).grad_norm)
            norms = torch.cat([it.to_local().detach().view(-1) for it in prepared[0].parameters() if it.device_mesh.ndim == 1])
            states.append((norm, norms.numel(), model_tensors.digest_of("", norms)))
        found["stepped"] = runtime.gather(states)
    runtime.accelerator.free_memory(*prepared)
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
