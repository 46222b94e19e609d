"""Language models where a preset changes the model before it divides it, and in half precision: the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import REPOSITORY, read_lines, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RECIPE = (
    "--recipe", "lm_tiny", "model.hidden_size=64", "model.layers=2", "model.heads=4", "model.head=chunked",
    "data.sequence_length=128", "train.global_batch_size=8", "train.steps=8", "train.max_validation_samples=8",
    "train.evaluate_every_steps=null", "train.evaluate_every_epochs=0", "optim.lr=0.002", "optim.clip_norm=0.5",
    "log.every_steps=1", "checkpoint.every_minutes=null",
)  # fmt: skip


def losses(run_dir: Path, preset: str | Path, processes: int, **env: str) -> list[float]:
    train(preset, run_dir, *RECIPE, processes=processes, env=env).check()
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]


def test_it_is_wrapped_before_it_is_divided(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", "cpu", 1)
    assert len(alone) == 8
    text = (REPOSITORY / "accelerate_configs" / "fsdp2.yaml").read_text()
    changed = tmp_path / "from_rank_0.yaml"
    changed.write_text(text.replace("fsdp_cpu_ram_efficient_loading: false", "fsdp_cpu_ram_efficient_loading: true"))
    assert changed.read_text() != text
    assert losses(tmp_path / "from_rank_0", changed, 2) == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
def test_it_is_compiled_before_it_is_divided(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", "cpu", 1)
    for preset in ("fsdp2", "context_parallel"):
        compiled = losses(tmp_path / preset, preset, 2, ACCELERATE_DYNAMO_BACKEND="AOT_EAGER")
        assert compiled == pytest.approx(alone, rel=1e-5), preset


def test_in_half_precision_by_chunks(tmp_path: Path) -> None:
    """bf16 keeps 8 bits: each step within 1 %. FSDP2, which rounds the embeddings too, was seen 0.2 % off."""
    alone = losses(tmp_path / "alone", "cpu", 1, ACCELERATE_MIXED_PRECISION="bf16")
    for preset in ("fsdp2", "deepspeed_zero3", "context_parallel"):
        found = losses(tmp_path / preset, preset, 2, ACCELERATE_MIXED_PRECISION="bf16")
        assert found == pytest.approx(alone, rel=1e-2), preset
    assert alone[-1] < alone[0]
