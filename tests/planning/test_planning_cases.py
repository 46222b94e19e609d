"""What a plan predicts, compared with what real runs of the application took from torch's allocator, on CPUs through gloo.

Of one process, DDP and FSDP2: benchmarks/RESULTS.md has what was measured under ZeRO.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import REPOSITORY, SCRIPTS, Started, accelerate

from app.environment.launched import Sharding
from app.planning.memory import Case, peak
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan

STEPS = ("train.steps=1000", "train.epochs=null", "train.evaluate_every_steps=1000", "train.max_validation_samples=32")
PRESETS = {"single": "cpu", "ddp": "multi_gpu", "fsdp2": "fsdp2"}
BLOCKS = "train.checkpoint_activations=blocks"
RESNET = ("digits", "model.name=resnet18", "train.global_batch_size=64")
LLAMA = ("lm_tiny", "model.hidden_size=512", "model.heads=8", "model.layers=6", "data.sequence_length=256")
GPT2 = ("lm_tiny", "model.architecture=gpt2", "model.hidden_size=384", "model.layers=8", "model.vocab_size=8192")


@dataclass(frozen=True)
class Measured:
    """A run that is planned and trained."""

    words: tuple[str, ...]
    strategy: str = "single"
    precision: str = "no"

    @property
    def processes(self) -> int:
        return 1 if self.strategy == "single" else 2


SHORT = {
    "resnet18 sgd": Measured((*RESNET, "optim.name=sgd", "optim.lr=0.01")),
    "gpt2 nadam blocks": Measured((*GPT2, BLOCKS, "optim.name=nadam")),
    "gpt2 ddp blocks": Measured((*GPT2, BLOCKS), "ddp"),
    "resnet18 fsdp2": Measured(RESNET, "fsdp2"),
}
LONG = {
    "llama bf16": Measured(LLAMA, precision="bf16"),
    "gpt2 accumulation, average": Measured((*GPT2, "train.max_micro_batch=4", "train.ema_decay=0.9")),
    "llama ddp": Measured(LLAMA, "ddp"),
    "llama fsdp2 bf16 blocks": Measured((*LLAMA, BLOCKS), "fsdp2", "bf16"),
    "gpt2 fsdp2": Measured(GPT2, "fsdp2"),
    "text.py fsdp2": Measured((str(REPOSITORY / "examples/text.yaml"), "model.width=256"), "fsdp2"),
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SHORT.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_a_plan_is_within_5_percent_of_the_truth(case: Measured) -> None:
    assert abs(predicted(case) / trained(case) - 1) <= 0.05


def predicted(case: Measured) -> int:
    """The plan's bytes, for the kernels of a CPU; the memory of the machine is added, which there is the same."""
    recipe_name, *overrides = case.words
    recipe = recipe_file.load(recipe_name, (*overrides, *STEPS)).recipe
    memory = peak(
        Case(
            recipe,
            Sharding("fsdp2" if case.strategy == "fsdp2" else "ddp"),
            data_ranks=case.processes,
            micro_batch=BatchPlan.of(recipe, case.processes).micro_batch,
            precision=case.precision,
            recomputes=recipe.train.checkpoint_activations == "blocks",
            device="cpu",
        )
    )
    return memory.total + memory.host


def trained(case: Measured) -> int:
    """The most bytes that the allocator gave out within three steps, on the rank that needed most."""
    recipe, *overrides = case.words
    with tempfile.TemporaryDirectory() as folder:
        words = [folder, "--recipe", recipe, "--run-dir", f"{folder}/run", *overrides, *STEPS]
        target = (str(SCRIPTS / "allocations.py"), *words)
        processes = None if case.strategy == "single" else case.processes
        command = accelerate(PRESETS[case.strategy], "--mixed_precision", case.precision, target=target, processes=processes)
        started = Started(command, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        started.wait(timeout_s=1800).check()  # bf16 on a CPU without its instructions takes ten times as long
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(case.processes)]
    assert [each["count"] for each in found] == [3] * case.processes
    return max(each["steps"] for each in found)
