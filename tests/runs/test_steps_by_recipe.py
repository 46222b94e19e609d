"""Steps that the recipe skips, a line of each step, and checkpoints that stay: the same on any topology and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import tensors
from processes import read, read_lines, train

from app.checkpoints import step_folders
from app.checks.verify import Verdict, verify

pytestmark = pytest.mark.multiproc

STEPS = 40
SKIPPED = [1, 2, *range(12, 24), 30]  # the first two: before the optimizer has any state
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=64", "train.skip_steps=[[1,3],[12,24],[30,31]]",
    "train.max_skipped_steps=2", "train.ema_decay=0.9", "model.activation=gelu", "model.pooling=average", "augment.mixup=0.2",
    "log.every_steps=7", "log.each_step=true", "train.evaluate_every_epochs=0", "checkpoint.every_minutes=null",
    "checkpoint.every_steps=5", "checkpoint.keep_last=1", "checkpoint.keep_every=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, two passes a step: more declared skips in a row than it may skip steps on its own."""
    folder = tmp_path_factory.mktemp("alone")
    train("cpu", folder, *RECIPE, "train.max_micro_batch=32").check()
    return folder


def verdict_of(run_dir: Path) -> Verdict:
    verdict, _ = verify(run_dir)
    assert verdict.is_good
    return verdict


def assert_same(run_dir: Path, reference: Path) -> None:
    """Every step, skipped or not, and the final weights."""
    lines, expected = (read_lines(folder / "steps.jsonl") for folder in (run_dir, reference))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "lines of an earlier attempt are replaced"
    for name in ("skipped", "learning_rate"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    for name in ("loss", "gradient_norm"):
        found, numbers = ([line[name] for line in of if line["step"] not in SKIPPED] for of in (lines, expected))
        assert found == pytest.approx(numbers, rel=1e-5)
    assert read(run_dir / "result.json")["test_loss"] == pytest.approx(read(reference / "result.json")["test_loss"], rel=1e-5)
    assert [step for span in verdict_of(run_dir).skipped_by_recipe for step in span] == SKIPPED


def test_a_skipped_step_changes_nothing_and_counts_for_nothing(alone: Path) -> None:
    lines, logged = read_lines(alone / "steps.jsonl"), read_lines(alone / "metrics.jsonl")
    assert [line["step"] for line in lines if line["skipped"]] == SKIPPED
    assert all(line["loss"] is line["gradient_norm"] is None for line in lines if line["skipped"])
    for line, first in zip(logged, [1, 8, 15, 22, 29, 36], strict=True):
        losses = [it["loss"] for it in lines if first <= it["step"] <= line["step"] and not it["skipped"]]
        assert line["loss"] == (pytest.approx(sum(losses) / len(losses), rel=1e-12) if losses else None)
        assert line["skipped_steps"] == []
        assert line["learning_rate"] == lines[line["step"] - 1]["learning_rate"]
    states = [tensors(step_folders.path_of(alone, step) / "rank-00000.safetensors") for step in (10, 12, 18, 22, 24)]
    assert states[1] == states[2] == states[3], "weights, moments and averages"
    assert states[0] != states[1]
    assert states[3] != states[4]
    text = str(verdict_of(alone))
    assert f"every one of the {STEPS} global batches was processed exactly once" in text
    assert "15 steps were skipped as train.skip_steps specifies: 1-2, 12-23, 30" in text


def test_multiples_of_keep_every_are_saved_and_stay(alone: Path) -> None:
    kept = [path.name for path in reversed(step_folders.committed(alone))]
    assert kept == [f"step-{step:08d}" for step in range(2, STEPS + 1, 2)], "5, 15, 25 and 35 were saved too"
    assert {line["step"] for line in read_lines(alone / "ledger.jsonl") if line["event"] == "saved"} >= {5, 15, 25, 35}


def test_two_processes_skip_the_same_steps(alone: Path, tmp_path: Path) -> None:
    train("multi_gpu", tmp_path, *RECIPE, processes=2).check()
    assert_same(tmp_path, alone)


@pytest.mark.parametrize(("preset", "saved"), [("fsdp2", 2), pytest.param("deepspeed_zero3", 18, marks=pytest.mark.slow)])
def test_a_resumed_attempt_skips_the_same_steps(alone: Path, tmp_path: Path, preset: str, saved: int) -> None:
    run_dir = Path(shutil.copytree(alone, tmp_path / "run"))
    for folder in step_folders.committed(run_dir):
        if folder > step_folders.path_of(run_dir, saved):
            shutil.rmtree(folder)
    (run_dir / "result.json").unlink()
    train(preset, run_dir, *RECIPE, "--resume", "auto", processes=2).check()
    assert read(run_dir / "run.json")["resumed_step"] == saved
    assert_same(run_dir, alone)


def test_later_steps_may_be_skipped_from_a_resume_on(alone: Path, tmp_path: Path) -> None:
    def resumed(run_dir: Path, skip_steps: str) -> Any:
        changed = [f"train.skip_steps={skip_steps}" if word.startswith("train.skip_steps") else word for word in RECIPE]
        return train("cpu", run_dir, *changed, "--resume", str(step_folders.path_of(alone, 18)))

    resumed(tmp_path / "later", "[[1,3],[12,22],[36,38]]").check()
    assert verdict_of(tmp_path / "later").skipped_by_recipe == [range(19, 22), range(36, 38)]
    refused = resumed(tmp_path / "earlier", "[[1,3],[12,18]]")
    assert refused.returncode != 0
    assert "is at step 18, and train.skip_steps was [[1, 3], [12, 24], [30, 31]] and is [[1, 3], [12, 18]]" in refused.output
