"""A flood of connections to the port of a start: it ends with a sentence, and leaves no process."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import Started, free_port

from app.errors import HangError

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def flood(port: int, *, per_s: float, seconds: float, patience_s: float = 60.0) -> None:
    """Connect to a port, and hang up, again and again, from the moment at which something listens there."""
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            break
        time.sleep(0.02)
    begun_s = time.monotonic()
    for number in range(int(per_s * seconds)):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            pass
        time.sleep(max(0.0, begun_s + number / per_s - time.monotonic()))


def test_a_flooded_start_ends_with_a_sentence(tmp_path: Path) -> None:
    port = free_port()
    words = ["--preset", "multi_gpu", "--processes", "2", "--port", str(port), "--run-dir", str(tmp_path / "run")]
    started = Started(["samerun", "launch", *words, "--trackers", "none", "train.steps=2"])
    flood(port, per_s=200, seconds=8)
    processes = started.processes()
    ended = started.wait()
    assert ended.returncode == HangError.exit_code, ended.output
    assert f"HangError: the store at 127.0.0.1:{port}, through which the processes meet, gave rank" in ended.output
    assert "while it was joining the other processes" in ended.output
    assert not psutil.wait_procs(processes, timeout=5)[1]
