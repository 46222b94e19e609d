"""DeepSpeed's operators where they cannot be compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run

from app.errors import PresetError


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["HOME", "TORCH_EXTENSIONS_DIR"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    variables = {"TORCH_EXTENSIONS_DIR": "", name: str(tmp_path / "file")}
    arguments = ("--recipe", "digits", "train.steps=1", "--run-dir", str(tmp_path / "run"), "--trackers", "none")
    finished = run("deepspeed_zero1", 1, "app.train", *arguments, env=variables)
    assert finished.returncode == PresetError.exit_code, finished.output
    assert re.search(rf"PresetError: .* {tmp_path}/file.* cannot be used \(.*\): set TORCH_EXTENSIONS_DIR", finished.output)
    assert "Traceback" not in finished.output
