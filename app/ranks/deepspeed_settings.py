"""DeepSpeed's settings: the preset's, plus those that come from the recipe, which the preset must leave out.

Most presets say little, and Accelerate makes a DeepSpeed config of it; one may also name a config file of DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DeepSpeedPlugin

from app.errors import PresetError
from app.recipe.batching import BatchPlan


def complete(plan: BatchPlan, clip_norm: float) -> DeepSpeedPlugin:
    """Return the preset's settings with those that the recipe and the plan decide.

    Raises PresetError if the preset sets one of these itself, or what would have something else learnt.
    """
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=plan.accumulation, gradient_clipping=clip_norm)
    config = plugin.deepspeed_config
    _refuse_what_the_recipe_decides(config)
    # DeepSpeed 0.19 clips at 1.0 unless it is told 0.0, and Accelerate does not pass 0.0 on.
    config["gradient_clipping"] = clip_norm
    config["train_micro_batch_size_per_gpu"] = plan.micro_batch
    # What steps on offloaded weights is torch's optimizer too. Accelerate 1.15 would put DeepSpeedCPUAdam in the place of any,
    # SGD as well (`map_pytorch_optim_to_deepspeed`). torch's fused AdamW is as fast: docs/performance.md.
    config["zero_force_ds_cpu_optimizer"] = False
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    accumulation = config["gradient_accumulation_steps"]
    if accumulation != plan.accumulation:
        raise PresetError(
            f"the DeepSpeed config's gradient_accumulation_steps is {accumulation}, and the recipe needs {plan.accumulation}: "
            'it is derived from train.global_batch_size. Write "auto" there.'
        )
    return plugin


def _refuse_what_the_recipe_decides(config: Mapping[str, Any]) -> None:
    """Raise PresetError for what a DeepSpeed config file may hold and must not: what would be learnt in another way."""
    zero = config["zero_optimization"]
    offload = zero.get("offload_optimizer") or {}
    reasons = {
        "optimizer": ("optimizer" in config, "the optimizer is the recipe's (optim.name)"),
        "scheduler": ("scheduler" in config, "the learning rate is the recipe's (optim.schedule)"),
        "zero_optimization.offload_optimizer.ratio": (
            offload.get("ratio", 1.0) != 1.0,
            "another optimizer would update a part of the weights",
        ),
        "zero_optimization.compute_grad_norm": (
            not zero.get("compute_grad_norm", True),
            "clipping, and skipping of gradients that are not finite, need the norm",
        ),
        "bf16.check_grad_overflow": (
            not config.get("bf16", {}).get("check_grad_overflow", True),
            "steps whose gradient is not finite must be skipped",
        ),
    }
    reasons |= {
        f"zero_optimization.offload_{what}.device: nvme": (
            (zero.get(f"offload_{what}") or {}).get("device") == "nvme",
            "checkpoints and weight averages cannot access NVMe; offload to the CPU (device: cpu)",
        )
        for what in ("optimizer", "param")
    }
    problems = [f"{key}: {why}" for key, (is_there, why) in reasons.items() if is_there]
    if problems:
        raise PresetError(f"the preset's DeepSpeed config must leave out {'; and '.join(problems)}.")
