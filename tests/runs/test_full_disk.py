"""A disk that fills up anywhere in a run: a sentence with path and reason, and nothing half-written; with space it goes on."""

from __future__ import annotations

import os
import re
import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest
from processes import SCRIPTS, Finished, read, run, train

from app.errors import CheckpointError, RunFolderError
from app.files.lines import Lines
from app.runs.claim import claim

LINES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl")


def leave_free(small_disk: Path, kib: int) -> None:
    """Fill the disk up to so many KiB."""
    filler = small_disk / "filler"
    filler.unlink(missing_ok=True)
    size = os.statvfs(small_disk)
    filler.write_bytes(bytes(size.f_bavail * size.f_frsize - kib * 1024))


def assert_nothing_is_half_written(run_dir: Path) -> None:
    """What a start was making is gone, and what has its name is whole."""
    for path in run_dir.rglob("*"):
        parts = path.relative_to(run_dir).parts
        assert not path.name.startswith("."), path
        assert parts[0] != "starts" or len(parts) <= 2 or parts[2] == "start.json", path
        if path.suffix == ".json":
            read(path)
        if path.suffix == ".jsonl":
            lines = Lines(path)
            assert len(list(lines)) >= 0
            assert lines.complaint is None


def written(run_dir: Path) -> None:
    """What a start writes, a few KiB of each kind of file."""
    with closing(claim(run_dir)) as ours:
        ours.remove("outcome.json")
        ours.go_on_after(3)
        for name in ("preset.yaml", "run.json", "recipe.yaml"):
            ours.write_text(name, '"' + "x" * 3000 + '"')
        for step in range(4, 14):
            for name in LINES:
                ours.append(name, {"step": step, "text": "x" * 500})
        ours.sync()
        with ours.staged("test_predictions") as folder:
            folder.mkdir()
            for name in ("1.png", "2.png"):
                (folder / name).write_bytes(bytes(5000))
        ours.write_text("result.json", '"' + "x" * 3000 + '"')


@pytest.mark.parametrize("again", [False, True], ids=["a new run", "one that goes on"])
def test_wherever_a_disk_fills_up_the_path_and_the_reason_are_said(small_disk: Path, again: bool) -> None:
    """At each free size from nothing up to what it takes, in the pages of the file system."""
    sentences, is_written = set(), False
    for kib in range(0, 124, 4):
        run_dir = small_disk / str(kib)
        run_dir.mkdir()
        if again:
            (small_disk / "filler").unlink(missing_ok=True)
            written(run_dir)
        leave_free(small_disk, kib)
        try:
            written(run_dir)
            is_written = True
        except RunFolderError as error:
            assert not is_written, f"{kib} KiB were not enough, and less were"
            said = str(error)
            assert said.startswith(f"{run_dir}/"), said
            assert said.endswith(" cannot be written: No space left on device. Free space there, or keep fewer checkpoints.")
            sentences.add(said.removeprefix(f"{run_dir}/").split()[0])
        assert_nothing_is_half_written(run_dir)
        (small_disk / "filler").unlink()
        written(run_dir)
        assert_nothing_is_half_written(run_dir)
        shutil.rmtree(run_dir)
    assert is_written
    assert sentences >= ({"test_predictions"} if again else {"starts/1", "run.json", "recipe.yaml", "metrics.jsonl"})


RECIPE = ("--recipe", "digits", "train.global_batch_size=64", "train.steps=12", "log.every_steps=1", "checkpoint.every_steps=4",
          "--resume", "auto")  # fmt: skip
CODES = {f"{kind.__name__}: ": kind.exit_code for kind in (RunFolderError, CheckpointError)}


def assert_is_one_sentence(finished: Finished, run_dir: Path) -> None:
    said = re.findall(rf"^({'|'.join(CODES)})(.*)", finished.output, re.MULTILINE)
    assert len(said) == 1, finished.output
    kind, sentence = said[0]
    assert finished.returncode == CODES[kind]
    assert "Traceback" not in finished.output
    assert re.fullmatch(rf"{run_dir}/\S+ cannot be written: No space left on device. Free space there.*", sentence), sentence
    assert_nothing_is_half_written(run_dir)


@pytest.mark.multiproc
def test_a_run_on_a_full_disk_ends_with_one_sentence_and_goes_on_when_there_is_space(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    for kib in (0, 24, 40, 56, 64):
        leave_free(small_disk, kib)
        assert_is_one_sentence(train("cpu", run_dir, *RECIPE), run_dir)
    (small_disk / "filler").unlink()
    train("cpu", run_dir, *RECIPE).check()
    assert read(run_dir / "result.json")["steps"] == 12


@pytest.mark.multiproc
def test_a_disk_that_is_full_when_lines_are_to_be_on_it_leaves_no_checkpoint_half_written(tmp_path: Path) -> None:
    """Some file systems find out only then. On rank 0 alone; all ranks end with the sentence."""
    run_dir = tmp_path / "run"
    script = str(SCRIPTS / "no_fsync.py")
    finished = run("multi_gpu", 2, script, "2", "--run-dir", str(run_dir), "--trackers", "none", *RECIPE)
    assert finished.returncode == RunFolderError.exit_code, finished.output
    assert f"rank 0 of 2 on {socket.gethostname()}: {run_dir}/ledger.jsonl cannot be written: No space left" in finished.output
    assert "Traceback" not in finished.output
    assert_nothing_is_half_written(run_dir)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]
