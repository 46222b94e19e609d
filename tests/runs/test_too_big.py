"""A model that is really too big: in the memory of two processes data parallelism dies, and what divides the model trains.

The limit is a control group's, around the launcher and both. What they learn is what one process without a limit learns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import memory_group
import pytest
from processes import Started, clean_environment, launch, read_lines

pytestmark = [
    pytest.mark.long,
    pytest.mark.multiproc,
    pytest.mark.skipif(memory_group.why_not() is not None, reason=str(memory_group.why_not())),
]

LIMIT_BYTES = 6 * 2**30
"""Of 201M parameters: AdamW's weights, gradients and moments are 3.0 GiB in each process, or 1.5 where two divide them."""
MODEL = ("model.hidden_size=768", "model.layers=16", "model.heads=12", "model.intermediate_size=3072", "model.vocab_size=32000",
         "model.tie_embeddings=false")  # fmt: skip
STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Short rows of a few tokens: what takes memory is the model."""
    folder = tmp_path_factory.mktemp("tokens")
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(bytes(range(125)) * 2 * 17)
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


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]


def launched_in(group: memory_group.Group, preset: str, run_dir: Path, recipe: tuple[str, ...]) -> Any:
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", preset, "--processes", "2", "--run-dir", str(run_dir)]
    return Started(group.inside([*command, *recipe]), env=clean_environment()).wait()


def test_data_parallelism_ends_with_a_sentence(recipe: tuple[str, ...], tmp_path: Path) -> None:
    with memory_group.limited(LIMIT_BYTES) as group:
        finished = launched_in(group, "multi_gpu", tmp_path / "run", recipe)
    assert finished.returncode not in (0, None)
    assert "lack of memory" in finished.output
    assert "fsdp2" in finished.output, "what to change"


def test_what_divides_the_model_trains_as_one_process_does(recipe: tuple[str, ...], alone: list[float], tmp_path: Path) -> None:
    with memory_group.limited(LIMIT_BYTES) as group:
        finished = launched_in(group, "fsdp2", tmp_path / "run", recipe).check()
        print(f"fsdp2: peak {group.peak_bytes / 2**30:.2f} of {LIMIT_BYTES / 2**30:.2f} GiB")
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)
    assert len(alone) == STEPS, finished.output
