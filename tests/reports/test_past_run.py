"""A run folder is read whole, and as far as it goes where files are missing or cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.errors import RunFolderError
from app.reports import past_run
from app.runs import ledger


@pytest.fixture
def copied(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "copied"))


def test_a_finished_run_is_read_whole(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    assert run.complaints == []
    assert run.recipe["train"]["epochs"] == 2
    assert run.about["world_size"] == 1
    assert run.total_steps == run.result["steps"] == run.metrics[-1]["step"]
    assert run.samples_per_epoch == run.result["steps"] * 64 // 2
    assert [line["epoch"] for line in run.evaluations] == [0, 1]
    assert run.outcome["outcome"] == "finished"
    assert isinstance(run.events[0], ledger.Start)
    times = [line["time"] for line in run.metrics]
    assert times == sorted(times)
    assert run.events[0].launched < times[0]


def test_missing_files_are_sentences_and_the_rest_is_there(copied: Path) -> None:
    names = ("run.json", "metrics.jsonl", "ledger.jsonl")
    for name in names:
        (copied / name).unlink()
    run = past_run.read(copied)
    assert all(sum(str(copied / name) in complaint for complaint in run.complaints) == 1 for name in names)
    assert (run.about, run.metrics, run.events, len(run.complaints)) == ({}, [], [], 3)
    assert run.recipe
    assert run.evaluations


def test_cut_and_foreign_lines_are_left_out(copied: Path) -> None:
    path = copied / "metrics.jsonl"
    whole = past_run.read(copied).metrics
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "[1]\n", *lines[1:-1], lines[-1][:20]]))
    run = past_run.read(copied)
    assert list(run.metrics) == list(whole[:-1])
    (complaint,) = run.complaints
    assert "2 lines are damaged or truncated (the first is line 2: it is list, not an object)" in complaint


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        past_run.read(tmp_path)
    with pytest.raises(RunFolderError, match="is not a folder"):
        past_run.read(tmp_path / "nothing")
