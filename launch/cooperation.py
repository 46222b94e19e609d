"""How the processes of a preset shard a model, in the terms of `app/planning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from launch.preset import Preset


def strategy(preset: Preset) -> str:
    """Return how the processes of a preset cooperate, a word of `app/planning/kept.py`'s ORDER."""
    settings: Mapping[str, Any] = yaml.safe_load(preset.path.read_text())
    sizes = settings.get("parallelism_config") or {}
    if preset.distributed_type == "FSDP":
        if sizes.get("parallelism_config_tp_size", 1) != 1:
            return "tensor_parallel"
        return "fsdp2" if sizes.get("parallelism_config_dp_replicate_size", 1) == 1 else "hsdp"
    if preset.distributed_type == "DEEPSPEED":
        section = settings.get("deepspeed_config") or {}
        stage = section.get("zero_stage", 2)
        is_offloaded = any(section.get(f"offload_{what}_device", "none") != "none" for what in ("param", "optimizer"))
        return "ddp" if not stage else f"zero{stage}" + ("_offload" if is_offloaded and stage == 3 else "")
    return "single" if preset.is_single_process else "ddp"


def copies(of: str, *, nodes: int, devices: int) -> tuple[int, int]:
    """Return the replicas of the model and the processes that divide each layer, where a launch has so many of both."""
    replicas = nodes if of == "hsdp" else 1
    return replicas, (devices // nodes if of == "tensor_parallel" else 1)
