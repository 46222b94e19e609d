"""A run that is out of memory ends with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from processes import train

from app.distributed.runtime import Runtime
from app.environment.launched import Launched, Sharding
from app.errors import LackOfMemoryError
from app.planning.memory import out_of_memory_explained
from app.recipe.schema import BatchPlan, Recipe


@pytest.mark.parametrize(
    ("sharding", "processes", "on_cpu", "remedy"),
    [
        (Sharding(), 1, True, "several machines with --preset fsdp2"),
        (Sharding("deepspeed", stage=2), 8, False, "--preset fsdp2"),
        (Sharding("fsdp2", replicas=2), 8, False, "--preset fsdp2"),
        (Sharding("fsdp2"), 8, False, "more devices, or --preset deepspeed_zero3_offload"),
        (Sharding("deepspeed", stage=3), 8, True, "more machines"),
        (Sharding("deepspeed", stage=3, offload=True), 1, False, "more devices"),
    ],
)
def test_what_shards_more(*, sharding: Sharding, processes: int, on_cpu: bool, remedy: str) -> None:
    assert sharding.remedy(processes, on_cpu=on_cpu) == remedy


@pytest.mark.multiproc
def test_a_failed_allocation_ends_with_what_to_change(tmp_path: Path) -> None:
    finished = train("multi_gpu", tmp_path / "run", "--recipe", "digits", f"model.channels=1,{10**15}", processes=2)
    assert finished.returncode == LackOfMemoryError.exit_code, finished.output
    assert "Traceback" not in finished.output
    (sentence, *_) = re.findall(r"LackOfMemoryError: (.*)", finished.output)
    assert f"you tried to allocate {36 * 10**15} bytes" in sentence
    assert sentence.endswith("Change train.max_micro_batch=16, or train.checkpoint_activations=blocks, or --preset fsdp2")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("20 GiB"), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_errors_that_mean_too_little_memory(error: Exception) -> None:
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))
    with pytest.raises(LackOfMemoryError, match="cpu is out of memory"), out_of_memory_explained(runtime, Recipe()):
        raise error
    with pytest.raises(RuntimeError, match="other"), out_of_memory_explained(runtime, Recipe()):
        raise RuntimeError("other")
