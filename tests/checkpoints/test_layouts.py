"""Checkpoints of four processes under every layout of a mesh, read under every other: bit by bit, each element written once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, SCRIPTS

from app.checkpoints import manifest

LAYOUTS = ["ddp", "fsdp2", "hsdp", "tp2_fsdp2", "tp4", "tp1_fsdp2"]


@pytest.mark.multiproc
def test_what_is_saved_under_one_layout_is_read_under_every_other(tmp_path: Path) -> None:
    """Rows, columns, rows of columns and copies of them, also where nothing comes out even."""
    command = [sys.executable, str(SCRIPTS / "layouts.py"), str(tmp_path)]
    finished = subprocess.run(
        command, cwd=REPOSITORY, env={"PATH": "", "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.split("\n")[:-1] == [f"{layout}: {len(LAYOUTS)}" for layout in LAYOUTS]
    runs = {layout: columns_in(tmp_path / layout) for layout in LAYOUTS}
    assert {layout for layout, found in runs.items() if found} == {"tp2_fsdp2", "tp4"}


def columns_in(run_dir: Path) -> int:
    """How many ranges of the weights are columns."""
    _, tensors = manifest.read(run_dir / "checkpoints" / "step-00000001")
    return sum(region.runs > 1 for stored in tensors["weight"].values() for region, _ in stored.ranges)
