"""What is done once before training shows how far it has come, where it takes long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import clean_environment

from app.data.preprocessing import progress


def test_a_log_file_gets_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("copying", 2_500_000_000, "bytes", after_s=0) as advance:
        advance(2_500_000_000)
    with progress("listing", 1000, "folders") as advance:  # soon over
        advance(1000)
    assert capfd.readouterr() == ("", "copying: 2.50 GB\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_gets_a_bar(stream: str) -> None:
    """Also where only stdout is one, as in a run whose stderr its launcher reads."""
    program = (
        "from app.data.preprocessing import progress\n"
        "with progress('decoding', 8, 'pictures', after_s=0) as advance: advance(8)"
    )
    ours, theirs = os.openpty()
    try:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: theirs}
        environment = {**clean_environment(), "TERM": "xterm"}
        finished = subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60, **streams)
        os.set_blocking(ours, False)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "decoding" in shown
    assert "8/8" in shown
    assert not finished.stdout
    assert not finished.stderr
