"""A checkpoint goes on under any preset on any number of processes: the finished run is the undisturbed one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Started, accelerate, read, read_lines, train

from app import checkpoint_files
from app.verify import verify

pytestmark = pytest.mark.multiproc

HALF, STEPS = 15, 25
# Every state that a run has: both optimizers' moments, the average, and, in the middle of the second epoch (of 22 steps), the
# place in the data. GELU and average pooling for the reason that docs/same-run.md gives.
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=64", "train.ema_decay=0.9", "log.every_steps=1",
    "log.samples=true", "model.activation=gelu", "model.pooling=average", "augment.crop_padding=1", "augment.mixup=0.2",
    "optim.clip_norm=1.0",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": ("optim.name=adamw", "optim.lr=0.003"),
    "sgd": ("optim.name=sgd", "optim.lr=0.1", "optim.momentum=0.9"),
}
SAVING = (f"checkpoint.every_steps={HALF}", "checkpoint.keep_last=3")


def run(preset: str, processes: int, run_dir: Path, *arguments: str) -> Path:
    train(preset, run_dir, *RECIPE, *arguments, processes=None if preset == "cpu" else processes).check()
    return run_dir


def lines_after(run_dir: Path, name: str, step: int) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir / name) if line["step"] > step]


def assert_equals(found: Path, reference: Path, *, after: int) -> None:
    """Losses, learning rates, samples and the last test loss, which is that of the averaged weights."""
    lines, expected = (lines_after(run_dir, "metrics.jsonl", after) for run_dir in (found, reference))
    assert [line["step"] for line in lines] == list(range(after + 1, STEPS + 1))
    for name in ("learning_rate", "epoch", "samples_seen"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    samples = [lines_after(run_dir, "samples.jsonl", after) for run_dir in (found, reference)]
    assert len(samples[0]) == STEPS - after
    assert samples[0] == samples[1]
    results = [read(run_dir / "result.json") for run_dir in (found, reference)]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The undisturbed runs, in one process and without a checkpoint."""
    folder = tmp_path_factory.mktemp("references")
    return {name: run("cpu", 1, folder / name, *chosen) for name, chosen in OPTIMIZERS.items()}


# Each way to keep the tensors once as a source and once as a target.
@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [
        (("cpu", 1), ("deepspeed_zero3", 2), "adamw"),
        (("deepspeed_zero3", 2), ("fsdp2", 2), "adamw"),
        (("fsdp2", 2), ("deepspeed_zero2", 2), "adamw"),
        (("deepspeed_zero2", 2), ("multi_gpu", 4), "adamw"),
        (("multi_gpu", 4), ("deepspeed_zero1", 2), "sgd"),
        (("deepspeed_zero1", 2), ("cpu", 1), "sgd"),
    ],
)
def test_a_run_goes_on_under_another_preset(
    references: dict[str, Path], tmp_path: Path, source: tuple[str, int], target: tuple[str, int], optimizer: str
) -> None:
    reference, chosen = references[optimizer], OPTIMIZERS[optimizer]
    first = run(*source, tmp_path / "first", *chosen, *SAVING)
    assert_equals(first, reference, after=0)  # saving changes nothing
    saved = checkpoint_files.path_of(first, HALF)
    assert checkpoint_files.committed(first) == [checkpoint_files.path_of(first, STEPS), saved]
    second = run(*target, tmp_path / "second", *chosen, "--resume", str(saved))
    assert_equals(second, reference, after=HALF)
    assert [(verdict.is_good, verdict.first_step, verdict.last_step) for verdict, _ in map(verify, (first, second))] == [
        (True, 1, STEPS), (True, HALF + 1, STEPS)
    ]  # fmt: skip
    assert (read(second / "run.json")["resumed_step"], read(second / "run.json")["preset"]) == (HALF, target[0])


def test_a_killed_run_goes_on_in_its_folder(references: dict[str, Path], tmp_path: Path) -> None:
    """SIGKILL to all of it, and again under another preset: the log is that of one run."""
    for preset, processes, until in (("multi_gpu", 2, 6), ("deepspeed_zero2", 2, 17)):
        target = ("-m", "app.train", "--run-dir", str(tmp_path), "--trackers", "none", "--resume", "auto", *RECIPE,
                  *OPTIMIZERS["adamw"], "checkpoint.every_steps=4")  # fmt: skip
        started = Started(accelerate(preset, target=target, processes=processes))
        deadline_s = time.monotonic() + 120
        metrics = tmp_path / "metrics.jsonl"
        while not metrics.exists() or f'"step": {until},' not in metrics.read_text():
            assert time.monotonic() < deadline_s, started.kill().output
            time.sleep(0.01)
        started.kill()
    finished = train("cpu", tmp_path, *RECIPE, *OPTIMIZERS["adamw"], "--resume", "auto").check()
    assert "resumed from" in finished.output
    assert_equals(tmp_path, references["adamw"], after=0)
    assert_verified(tmp_path, starts=3)


def assert_verified(run_dir: Path, *, starts: int) -> None:
    """The ledger shows each step once, and does not if one of its lines is dropped, doubled or changed."""
    verdict, spent = verify(run_dir)
    whole = f"every one of the {STEPS} global batches was applied exactly once, over {starts} starts"
    assert str(verdict) == whole
    assert spent.lost_work_s > 0
    assert spent.queue_s is None  # no scheduler told when the run was submitted
    assert min(spent.startup_s, spent.compute_s, spent.data_wait_s, spent.evaluation_s, spent.saving_s, spent.down_s) > 0
    ledger = run_dir / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    at = max(number for number, line in enumerate(lines) if '"first": 20, "last": 20,' in line)
    other = json.dumps({**json.loads(lines[at]), "digests": json.loads(lines[at - 1])["digests"]}) + "\n"
    for harmed, words in (
        ([], "1 step was missing: 20"),
        ([lines[at], lines[at]], "1 step was recorded twice: 20"),
        ([other], "1 step was fed other samples than the recipe says: 20"),
    ):
        ledger.write_text("".join([*lines[:at], *harmed, *lines[at + 1 :]]))
        assert str(verify(run_dir)[0]).splitlines() == [f"NOT {whole}", words]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run("cpu", 1, folder, *OPTIMIZERS["adamw"], "checkpoint.every_steps=10", "checkpoint.keep_last=2")


def test_old_ones_are_pruned_and_a_finished_run_is_scored_again(finished_run: Path) -> None:
    assert [path.name for path in checkpoint_files.committed(finished_run)] == ["step-00000025", "step-00000020"]
    before = read(finished_run / "result.json")
    train("cpu", finished_run, *RECIPE, *OPTIMIZERS["adamw"], "--resume", "auto").check()
    assert read(finished_run / "result.json")["test_loss"] == before["test_loss"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("optim.lr=0.004", "seed=3"), ["is of another run", "optim.lr was 0.003 and is 0.004", "seed was 0 and is 3"]),
        (("model.hidden=64",), ["model.hidden was 128 and is 64"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_all_that_differs(
    finished_run: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    said = (*RECIPE, *OPTIMIZERS["adamw"], *arguments, "--resume", str(finished_run))
    finished = train("cpu", tmp_path / "run", *said)
    assert finished.returncode != 0
    assert [word for word in words if word not in finished.output] == [], finished.output
    assert not (tmp_path / "run").exists()


def test_damage_is_passed_over_and_said_and_never_becomes_a_start_from_zero(tmp_path: Path, finished_run: Path) -> None:
    newest, older = checkpoint_files.committed(finished_run)
    (newest / "rank-00000.safetensors").write_bytes(b"")
    longer = (*RECIPE, *OPTIMIZERS["adamw"], "train.steps=26", "--resume")
    finished = train("cpu", tmp_path / "run", *longer, str(finished_run)).check()
    assert f"passed over: {newest}" in finished.output
    assert f"resumed from {older}, 20 of 26 steps done" in finished.output
    (older / "state.json").unlink()
    finished = train("cpu", tmp_path / "other", *longer, str(finished_run))
    assert finished.returncode != 0
    assert "CheckpointError: " in finished.output
    assert "nothing is started from zero unasked" in finished.output


def test_a_finished_run_without_a_checkpoint_is_left_alone_and_a_killed_one_begins_again(tmp_path: Path) -> None:
    short = ("--recipe", "digits", "train.steps=2", "log.every_steps=1", "checkpoint.every_minutes=null")
    train("cpu", tmp_path, *short).check()
    before = (tmp_path / "metrics.jsonl").read_text()
    finished = train("cpu", tmp_path, *short, "--resume", "auto")
    assert finished.returncode != 0
    assert "RunFolderError: " in finished.output
    assert "holds a finished run without a checkpoint" in finished.output
    assert (tmp_path / "metrics.jsonl").read_text() == before
    (tmp_path / "result.json").unlink()  # as if it had been killed
    finished = train("cpu", tmp_path, *short, "--resume", "auto").check()
    assert f"{tmp_path} has no checkpoint yet: the run begins again" in finished.output
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    finished = train("cpu", tmp_path / "run", *RECIPE, "--resume", str(tmp_path))
    assert finished.returncode != 0
    assert f"CheckpointError: --resume is {tmp_path}, and there is no checkpoint" in finished.output
