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

from app.errors import LackOfMemoryError

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


DATA_KIB = 3_500_000
"""Limit of each process's own data. For the logits of a row of 8192 tokens a process takes 4 GiB, and 3 for half of them."""
LONG_ROW = ("--trackers", "none", "--recipe", "lm_tiny", "data.sequence_length=8192", "model.positions=8192",
            "model.vocab_size=32000", "model.head=whole", "model.hidden_size=64", "model.layers=1", "train.steps=2",
            "train.max_validation_samples=1", "optim.warmup_steps=null", "log.every_steps=1", "log.examples=0")  # fmt: skip


def test_a_row_too_long_for_a_process_trains_where_two_split_it(tmp_path: Path) -> None:
    """FSDP2, which shards the model over the same two processes, is out of memory like one process."""
    launch("cpu", tmp_path / "alone", *LONG_ROW, "train.global_batch_size=1").check()
    finished = {}
    for preset, processes, rows in (("cpu", 1, 1), ("fsdp2", 2, 2), ("context_parallel", 2, 1)):
        words = ["--preset", preset, "--processes", str(processes), "--run-dir", str(tmp_path / preset), *LONG_ROW]
        command = [sys.executable, "-m", "launch.cli", "launch", *words, f"train.global_batch_size={rows}"]
        limited = ["/bin/sh", "-c", f'ulimit -d {DATA_KIB} && exec "$@"', "sh", *command]
        finished[preset] = Started(limited, env={**clean_environment(), "OMP_NUM_THREADS": "1"}).wait()
    for preset in ("cpu", "fsdp2"):
        assert finished[preset].returncode == LackOfMemoryError.exit_code, finished[preset].output
    finished["context_parallel"].check()
    assert losses(tmp_path / "context_parallel") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
