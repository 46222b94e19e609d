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
_ITS_PRECISION = "set the precision by --mixed-precision"
_REFUSED = {
    "optimizer": "the optimizer is the recipe's (optim.name)",
    "scheduler": "the learning rate is the recipe's (optim.schedule)",
    "activation_checkpointing": "set train.checkpoint_activations in the recipe",
    "amp": _ITS_PRECISION,
    "torch_autocast": _ITS_PRECISION,
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "use --trackers"),
}
_OFFLOADING = {"device", "nvme_path", "buffer_count", "pin_memory"}
_KNOWN: Mapping[str, set[str]] = {
    "": {
        "zero_optimization", "fp16", "bf16", "communication_data_type", "data_types", "steps_per_print", "wall_clock_breakdown",
        "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "aio", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    },
    "zero_optimization": {
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
        "elastic_checkpoint", "offload_param", "offload_optimizer", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
        "round_robin_gradients", "zero_hpz_partition_size", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
    },
    "zero_optimization.offload_optimizer": {*_OFFLOADING, "ratio", "pipeline_read", "pipeline_write", "fast_init"},
    "zero_optimization.offload_param": {*_OFFLOADING, "buffer_size", "max_in_cpu"},
    "fp16": {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
             "consecutive_hysteresis", "min_loss_scale"},
    "bf16": {"enabled", "immediate_grad_update", "check_grad_overflow"},
}  # fmt: skip


def read(path: str) -> dict[str, Any]:
    """Return what the file says, if it may say it. Raises PresetError with everything that is wrong, one problem a line."""
    named = f"the preset's {KEY}, {path},"
    try:
        config = json.loads(Path(path).read_bytes(), object_pairs_hook=_once)
    except OSError as error:
        raise PresetError(
            f"{named} cannot be read from {Path.cwd()}: {error.strerror}. Correct the path, or give an absolute one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PresetError(f"{named} is not JSON: {error}") from error
    if problems := list(_problems(config)):
        raise PresetError("\n".join(f"{named} has {problem}" for problem in problems))
    return config  # type: ignore[no-any-return]


def refuse_nvme(zero: Mapping[str, Any]) -> None:
    """Raise PresetError if the section `zero_optimization` offloads to NVMe."""
    if problems := list(_nvme(zero)):
        raise PresetError("\n".join(problems))


def precision_problem(config: Mapping[str, Any], precision: str) -> str | None:
    """Return what the file says otherwise than --mixed-precision, or None."""
    for kind in ("bf16", "fp16"):
        said = _section(config, kind).get("enabled", False) if kind in config else "auto"
        if said not in ("auto", precision == kind):
            found = f"{kind}.enabled is {json.dumps(said)}, and the precision is {precision}"
            return f'{found}: write "auto" there, and give --mixed-precision'
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice: keep one of them")
    return found


def _problems(config: Any) -> Iterator[str]:
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        yield 'no section zero_optimization: write one, such as {"stage": 2}'
        return
    for key, value in config.items():
        if key in _DERIVED and value != "auto":
            yield f'{key}: {json.dumps(value)}: {_DERIVED[key]}, and write "auto" here or leave it out'
        elif key in _REFUSED:
            yield f"{key}: {_REFUSED[key]}; leave it out"
    yield from _unknown("", {key: value for key, value in config.items() if key not in {*_DERIVED, *_REFUSED}})
    zero = config["zero_optimization"]
    if zero.get("stage") not in (0, 1, 2, 3):
        yield f"zero_optimization.stage: {json.dumps(zero.get('stage'))}: it must be 0, 1, 2 or 3"
    yield from _nvme(zero)
    forbidden = (
        (
            "zero_force_ds_cpu_optimizer",
            config.get("zero_force_ds_cpu_optimizer"),
            "the optimizer is the recipe's (optim.name)",
        ),
        (
            "zero_optimization.offload_optimizer.ratio",
            _section(zero, "offload_optimizer").get("ratio", 1) != 1,
            "another optimizer would update a part of the weights",
        ),
        (
            "zero_optimization.compute_grad_norm",
            not zero.get("compute_grad_norm", True),
            "clipping, and skipping of gradients that are not finite, need the norm",
        ),
        (
            "bf16.check_grad_overflow",
            not _section(config, "bf16").get("check_grad_overflow", True),
            "steps whose gradient is not finite must be skipped",
        ),
    )
    yield from (f"{key}: {why}; leave it out" for key, is_wrong, why in forbidden if is_wrong)


def _unknown(place: str, section: Mapping[str, Any]) -> Iterator[str]:
    """What is unknown of a section, and of those within it."""
    for key, value in section.items():
        name = f"{place}.{key}" if place else key
        if key not in _KNOWN[place]:
            known = [*_KNOWN[place], *(() if place else _DERIVED)]
            yield f"{name}: unknown or unsupported; {did_you_mean(key, known, otherwise='leave it out', cutoff=0.75)}"
        elif name in _KNOWN and value is not None and not isinstance(value, dict):
            yield f"{name}: {json.dumps(value)}: it must be a section"
        elif name in _KNOWN:
            yield from _unknown(name, value or {})


def _nvme(zero: Mapping[str, Any]) -> Iterator[str]:
    for what in ("optimizer", "param"):
        if _section(zero, f"offload_{what}").get("device") == "nvme":
            key = f"zero_optimization.offload_{what}.device: nvme"
            yield f"{key}: checkpoints and weight averages cannot access NVMe; offload to the CPU (device: cpu)"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
