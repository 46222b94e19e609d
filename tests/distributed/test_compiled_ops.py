"""What is heard of DeepSpeed's operators while they are compiled, and where they cannot be."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from processes import run

from app.distributed import compiled_ops
from app.errors import PresetError


def test_compiling_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled_ops, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(compiled_ops, "_SAY_EVERY_S", 0.1)
    with compiled_ops._announced("adam", tmp_path):
        pass
    assert capsys.readouterr().err == "", "it was there"
    with compiled_ops._announced("adam", tmp_path):
        time.sleep(0.4)
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == f"compiling DeepSpeed's adam in {tmp_path}, once for this machine and version; this can take some minutes"
    assert others[:2] == ["still compiling DeepSpeed's adam, after 0 s"] * 2
    assert last == "compiled DeepSpeed's adam in 0 s"


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
