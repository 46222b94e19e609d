"""DeepSpeed's settings: the preset's, plus those that come from the recipe, which the preset must leave out.

Most presets say little, and Accelerate makes a DeepSpeed config of it; one may also name a config file of DeepSpeed's own.
"""

from __future__ import annotations

from accelerate.utils import DeepSpeedPlugin

from app.place import deepspeed_file
from app.recipe.batching import BatchPlan


def complete(plan: BatchPlan, clip_norm: float) -> DeepSpeedPlugin:
    """Return the preset's settings with those that the recipe and the plan decide.

    Raises PresetError if the preset sets one of these itself, or what would have something else learnt.
    """
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=plan.accumulation, gradient_clipping=clip_norm)
    config = plugin.deepspeed_config
    zero = config["zero_optimization"]
    deepspeed_file.refuse_nvme(zero)
    # DeepSpeed 0.19 clips at 1.0 unless it is told 0.0, and Accelerate does not pass 0.0 on.
    config["gradient_clipping"] = clip_norm
    config["train_micro_batch_size_per_gpu"] = plan.micro_batch
    config["gradient_accumulation_steps"] = plan.accumulation
    # What steps on offloaded weights is torch's optimizer too. Accelerate 1.15 would put DeepSpeedCPUAdam in the place of any,
    # SGD as well (`map_pytorch_optim_to_deepspeed`). torch's fused AdamW is as fast: docs/performance.md.
    config["zero_force_ds_cpu_optimizer"] = False
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    return plugin
