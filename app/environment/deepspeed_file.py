"""A config file of DeepSpeed's own, which a preset may name: read, and held to the same rule as the preset itself.

It says how the processes cooperate; what belongs to the recipe is refused there, with the key of the recipe to set. `samerun
launch` reads it before anything is started, and each process again, as plain `accelerate launch` starts them too. Keys and
values: deepspeed 0.19. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.errors import PresetError, did_you_mean

KEY = "deepspeed_config_file"
VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Variable: the file, as Accelerate hands it to the processes, which look from their working folder."""

_DERIVED = {
    "train_batch_size": "set train.global_batch_size in the recipe",
    "train_micro_batch_size_per_gpu": "it is derived from the recipe; to limit memory, set train.max_micro_batch",
    "gradient_accumulation_steps": "it is derived from the recipe; to limit memory, set train.max_micro_batch",
    "gradient_clipping": "clipping belongs to the recipe: set optim.clip_norm",
}
_UNCHANGED = {
    "check_grad_overflow": True, "compute_grad_norm": True, "ratio": 1,
    **dict.fromkeys(
        ("zero_force_ds_cpu_optimizer", "bf16_master_weights_and_grads", "bf16_optimizer_states",
         "fp16_master_weights_and_grads", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
         "zero_quantized_gradients", "zenflow", "legacy_stage1", "cpu_offload", "cpu_offload_param",
         "save_muon_momentum_buffer_in_memory", "super_offload"), False,
    ),
}  # fmt: skip
"""Keys that change what is computed, or where weights are kept, and the value that changes nothing.

DeepSpeed itself refuses unknown keys of sections.
"""
_TOP = {
    "zero_optimization", "fp16", "bf16", "communication_data_type", "data_types", "steps_per_print", "wall_clock_breakdown",
    "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "aio", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}  # fmt: skip


def read(path: str) -> dict[str, Any]:
    """Return what the file says, if it may say it. Raises PresetError with everything that is wrong, one problem a line."""
    named = f"the preset's {KEY}, {path},"
    try:
        config = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise PresetError(
            f"{named} cannot be read from {Path.cwd()}: {error.strerror}. Correct the path, or give an absolute one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PresetError(f"{named} is not JSON: {error}") from error
    if problems := list(_problems(config)):
        raise PresetError("\n".join(f"{named} has {problem}" for problem in problems))
    return config  # type: ignore[no-any-return]


def nvme_problem(zero: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the section `zero_optimization` if it offloads to NVMe, or None."""
    for what in ("offload_optimizer", "offload_param"):
        if section_of(zero, what).get("device") == "nvme":
            return f"{what}.device: nvme: checkpoints and weight averages cannot access NVMe; offload to the CPU (device: cpu)"
    return None


def precision_problem(config: Mapping[str, Any], precision: str) -> str | None:
    """Return how the file contradicts --mixed-precision, or None."""
    for kind in ("bf16", "fp16"):
        enabled = section_of(config, kind).get("enabled", "auto")
        if enabled not in ("auto", precision == kind):
            found = f"{kind}.enabled is {json.dumps(enabled)}, and the precision is {precision}"
            return f'{found}: write "auto" there, and give --mixed-precision'
    return None


def _problems(config: Any) -> Iterator[str]:
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        yield 'no section zero_optimization: write one, such as {"stage": 2}'
        return
    for key, value in config.items():
        if key in _DERIVED and value != "auto":
            yield f'{key}: {json.dumps(value)}: {_DERIVED[key]}, and write "auto" here or leave it out'
        elif key not in {*_TOP, *_DERIVED}:
            known = [*_TOP, *_DERIVED]
            yield f"{key}: unknown or unsupported; {did_you_mean(key, known, otherwise='leave it out', cutoff=0.75)}"
    zero = config["zero_optimization"]
    if zero.get("stage") not in (0, 1, 2, 3):
        yield f"zero_optimization.stage: {json.dumps(zero.get('stage'))}: it must be 0, 1, 2 or 3"
    if problem := nvme_problem(zero):
        yield problem
    for section in (config, zero, *(section_of(config, it) for it in ("bf16", "fp16")), section_of(zero, "offload_optimizer")):
        for key, value in section.items():
            if key in _UNCHANGED and value not in (None, _UNCHANGED[key]):
                yield f"{key}: {json.dumps(value)}: it changes what is computed, or where weights are kept; leave it out"


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config file or a preset; empty if there is none."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}
