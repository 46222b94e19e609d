"""What a plan predicts, compared with what real runs of the application took from torch's allocator, on CPUs through gloo.

Of one process, DDP and FSDP2: benchmarks/RESULTS.md has what was measured under ZeRO.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import REPOSITORY, SCRIPTS, Started, accelerate

from app.environment.launched import Sharding
from app.planning.memory import Case, peak
from app.recipe import recipe_file
from app.recipe.schema import BatchPlan

STEPS = ("train.steps=1000", "train.epochs=null", "train.evaluate_every_steps=1000", "train.max_validation_samples=32")
BLOCKS = "train.checkpoint_activations=blocks"
RESNET = ("digits", "model.name=resnet18", "train.global_batch_size=64")
LLAMA = ("lm_tiny", "model.hidden_size=512", "model.heads=8", "model.layers=6", "data.sequence_length=256")
GPT2 = ("lm_tiny", "model.architecture=gpt2", "model.hidden_size=384", "model.layers=8", "model.vocab_size=8192")
CASES = [
    pytest.param("cpu", "no", (*GPT2, BLOCKS, "optim.name=nadam"), marks=pytest.mark.long),
    pytest.param("fsdp2", "no", RESNET, marks=pytest.mark.slow),
    pytest.param("cpu", "no", (*RESNET, "optim.name=sgd", "optim.lr=0.01"), marks=pytest.mark.long),
    pytest.param("cpu", "bf16", LLAMA, marks=pytest.mark.long),
    pytest.param("cpu", "no", (*GPT2, "train.max_micro_batch=4", "train.ema_decay=0.9"), marks=pytest.mark.long),
    pytest.param("multi_gpu", "no", (*GPT2, BLOCKS), marks=pytest.mark.long),
    pytest.param("fsdp2", "bf16", (*LLAMA, BLOCKS), marks=pytest.mark.long),
    pytest.param("fsdp2", "no", (str(REPOSITORY / "examples/text.yaml"), "model.width=256"), marks=pytest.mark.long),
]


@pytest.mark.multiproc
@pytest.mark.parametrize(("preset", "precision", "words"), CASES)
def test_a_plan_is_within_5_percent_of_the_truth(preset: str, precision: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Predicted for the kernels of a CPU, with the memory of the machine; measured in three steps, on the rank with most."""
    name, *overrides = words
    processes = 1 if preset == "cpu" else 2
    recipe = recipe_file.load(name, (*overrides, *STEPS)).recipe
    case = Case(
        recipe,
        Sharding("fsdp2" if preset == "fsdp2" else "ddp"),
        data_ranks=processes,
        micro_batch=BatchPlan.of(recipe, processes).micro_batch,
        precision=precision,
        recomputes=recipe.train.checkpoint_activations == "blocks",
        device="cpu",
    )
    predicted = peak(case)
    arguments = (str(tmp_path), "--recipe", name, "--run-dir", str(tmp_path / "run"), *overrides, *STEPS)
    target = (str(SCRIPTS / "allocations.py"), *arguments)
    number = None if preset == "cpu" else processes
    command = accelerate(preset, "--mixed_precision", precision, target=target, processes=number)
    started = Started(command, env={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    started.wait(timeout_s=1800).check()  # bf16 on a CPU without its instructions takes ten times as long
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert [each["count"] for each in found] == [3] * processes
    assert (predicted.total + predicted.host) / max(each["steps"] for each in found) == pytest.approx(1, abs=0.05)
