"""What is done once before training shows how far it has come, where it takes long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import clean_environment

from app.data import preprocessing
from app.data.preprocessing import progress


def test_a_log_file_gets_a_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("listing", 1000, "folders") as advance:  # soon over
        advance(1000)
    monkeypatch.setattr(preprocessing, "_SHOWN_AFTER_S", 0.0)
    with progress("copying", 2_500_000_000, "bytes") as advance:
        advance(1)
        advance(2_499_999_999)
    assert capfd.readouterr() == ("", "copying: 2.50 GB\n")


def test_a_terminal_gets_a_bar() -> None:
    """Also where only stdout is one, as in a run whose stderr its launcher reads."""
    program = (
        "from app.data import preprocessing\n"
        "preprocessing._SHOWN_AFTER_S = 0.0\n"
        "with preprocessing.progress('decoding', 8, 'pictures') as advance: advance(8)"
    )
    ours, theirs = os.openpty()
    environment = {**clean_environment(), "TERM": "xterm"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=environment, check=True, timeout=60, stdout=theirs, stderr=subprocess.PIPE)
    os.set_blocking(ours, False)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "decoding" in shown
    assert "100%" in shown
    assert not finished.stderr
