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
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe

TASK = """
import torch
from torch import nn
from torch.nn import functional

from app.task import Loss, Samples


class Own:
    def samples(self, split):
        return None if split == "validation" else Samples.of({"x": torch.arange(64.0)[:, None]})

    def model(self, metadata):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        torch.empty(2**52)
        return Loss(functional.mse_loss(model(batch["x"]), batch["x"]), len(batch["x"]))


task = Own
"""


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
    (tmp_path / "own.py").write_text(TASK)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("task: own.py\ntrain: {global_batch_size: 8, steps: 4}\n")
    finished = train("multi_gpu", tmp_path / "run", "--recipe", str(recipe), processes=2)
    assert finished.returncode == LackOfMemoryError.exit_code, finished.output
    assert "Traceback" not in finished.output
    (sentence, *_) = re.findall(r"LackOfMemoryError: (.*)", finished.output)
    assert f"you tried to allocate {2**54} bytes" in sentence
    assert sentence.endswith("Change train.max_micro_batch=2, or train.checkpoint_activations=blocks, or --preset fsdp2")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("20 GiB"), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_errors_that_mean_too_little_memory(error: Exception) -> None:
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))
    with pytest.raises(LackOfMemoryError, match="cpu is out of memory"), out_of_memory_explained(runtime, Recipe()):
        raise error
    with pytest.raises(RuntimeError, match="other"), out_of_memory_explained(runtime, Recipe()):
        raise RuntimeError("other")
