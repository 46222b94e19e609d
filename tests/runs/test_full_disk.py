"""A disk that fills up anywhere in a run: a sentence with path and reason, and nothing half-written; with space it goes on."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from processes import SCRIPTS, Finished, read, run, train

from app.errors import CheckpointError, RunFolderError
from app.files.text_files import Lines


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


RECIPE = ("--recipe", "digits", "train.global_batch_size=64", "train.steps=12", "log.every_steps=1", "checkpoint.every_steps=4",
          "--resume", "auto")  # fmt: skip
CODES = {f"{kind.__name__}: ": kind.exit_code for kind in (RunFolderError, CheckpointError)}


def assert_is_one_sentence(finished: Finished, run_dir: Path) -> None:
    said = re.findall(rf"^samerun: ({'|'.join(CODES)})(.*)", finished.output, re.MULTILINE)
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
