"""`samerun curves`: every run that can be drawn is drawn, from its folder alone, and every other one is a sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch import cli


@pytest.fixture
def runs(digits_run: Path, tmp_path: Path) -> Path:
    """A folder of runs, as copied from elsewhere: one whole, one cut while a line was written, and one that left nothing."""
    for number in (1, 2, 10):
        shutil.copytree(digits_run, tmp_path / "runs" / f"digits-{number}")
    cut = tmp_path / "runs" / "digits-2"
    (cut / "metrics.jsonl").write_bytes((cut / "metrics.jsonl").read_bytes()[:-30])
    (cut / "evaluations.jsonl").unlink()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / "runs" / "digits-10" / name).unlink()
    return tmp_path / "runs"


def test_a_folder_of_runs_is_drawn_and_what_is_broken_is_said(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert cli.main(["curves", str(runs), str(runs / "digits-1"), str(tmp_path), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    names = ["curves.pdf", "curves.png"]
    assert printed.out.splitlines() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert (out / "curves.pdf").read_bytes().startswith(b"%PDF")
    picture = np.asarray(Image.open(out / "curves.png").convert("L"))
    assert (picture < 128).mean() > 0.005, "nothing is drawn"
    for sentence in (
        f"{tmp_path} is not the folder of a run",
        f"{runs / 'digits-10' / 'metrics.jsonl'} cannot be read: No such file",
        f"{runs / 'digits-2' / 'metrics.jsonl'}: a line is damaged or truncated",
        "digits-2: no validation accuracy is recorded",
    ):
        assert sum(sentence in line for line in printed.err.splitlines()) == 1, printed.err


def test_nothing_to_draw_is_an_error(runs: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["curves", str(runs / "digits-10"), str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 7
    assert "there is nothing to draw" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
