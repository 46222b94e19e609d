"""A model that is really too big: in this memory data parallelism dies, and what divides the model trains.

The limit is a control group's, around the launcher and all processes. They learn what one process learns without a limit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import memory_group
import numpy as np
import pytest
from languages import write_tokens
from processes import Finished, Started, clean_environment, launch, losses

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiproc,
    pytest.mark.skipif(memory_group.why_not() is not None, reason=str(memory_group.why_not())),
]

LIMIT_GIB = 7.25
"""For two processes. Of 201M parameters AdamW's weights, gradients and moments are 3.0 GiB in each process, or 1.5
where two divide them. In float32 DeepSpeed keeps a quarter more. On 2 processes data parallelism is killed in 7.5 GiB as
well and trains in 8, ZeRO-3 trains in 6.5, and offload in 7."""
MODEL = ("model.hidden_size=768", "model.layers=16", "model.heads=12", "model.intermediate_size=3072", "model.vocab_size=32000",
         "model.tie_embeddings=false")  # fmt: skip
STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Short rows of a few tokens: what takes memory is the model."""
    folder = write_tokens(
        tmp_path_factory.mktemp("too-big") / "tokens", np.frombuffer(bytes(range(125)) * 2 * 17, np.uint16), 32000
    )
    return ("--trackers", "none", "--recipe", "lm_tiny", f"data.path={folder}", "data.sequence_length=16", *MODEL,
            "train.global_batch_size=4", f"train.steps={STEPS}", "train.max_validation_samples=4", "optim.warmup_steps=null",
            "optim.lr=0.0003", "log.every_steps=1", "log.examples=0",
            "checkpoint.every_minutes=null")  # fmt: skip


@pytest.fixture(scope="module")
def alone(recipe: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process without a limit."""
    run_dir = tmp_path_factory.mktemp("alone")
    launch("cpu", run_dir, *recipe).check()
    return losses(run_dir)


def launched_in(group: memory_group.Group, preset: str, run_dir: Path, recipe: tuple[str, ...]) -> Finished:
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", preset, "--processes", "2"]
    return Started(group.inside([*command, "--run-dir", str(run_dir), *recipe]), env=clean_environment()).wait()


def small_buffers(folder: Path, **offload: dict[str, str]) -> str:
    """The preset of docs/big-models.md: ZeRO-3 with buffers of tens of millions of numbers, not of DeepSpeed's 1e9."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": 25_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_max_live_parameters": 30_000_000,
        "stage3_max_reuse_distance": 30_000_000,
    }
    derived = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config, preset = folder / "zero3.json", folder / "zero3.yaml"
    config.write_text(json.dumps({**dict.fromkeys(derived, "auto"), "zero_optimization": zero | offload}))
    section = {"deepspeed_config_file": str(config), "deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}
    preset.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))  # JSON is YAML
    return str(preset)


def test_data_parallelism_ends_with_a_sentence(recipe: tuple[str, ...], tmp_path: Path) -> None:
    with memory_group.limited(int(LIMIT_GIB * 2**30)) as group:
        finished = launched_in(group, "multi_gpu", tmp_path / "run", recipe)
    assert finished.returncode not in (0, None)
    assert "out of memory" in finished.output
    assert "fsdp2" in finished.output, "what to change"


@pytest.mark.parametrize("way", ["fsdp2", "zero3", "zero3_offload"])
def test_what_divides_the_model_trains_as_one_process_does(
    way: str, recipe: tuple[str, ...], alone: list[float], tmp_path: Path
) -> None:
    to_host = {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")} if way == "zero3_offload" else {}
    preset = way if way == "fsdp2" else small_buffers(tmp_path, **to_host)
    with memory_group.limited(int(LIMIT_GIB * 2**30)) as group:
        finished = launched_in(group, preset, tmp_path / "run", recipe).check()
        print(f"{way}: peak {group.peak_bytes / 2**30:.2f} of {LIMIT_GIB} GiB")
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)
    assert len(alone) == STEPS, finished.output
