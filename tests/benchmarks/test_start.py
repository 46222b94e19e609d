"""What a start costs, as `python -m benchmarks.start` measures it, of a program whose cost is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import start

STEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "held = b'x' * 50_000_000; import time; time.sleep(60)"])
time.sleep(1)
began_s = time.process_time()
while time.process_time() < began_s + 0.5:
    pass
print("step 1/9  loss 2.3", flush=True)
time.sleep(60)
"""


def test_time_cpu_time_and_memory_are_those_of_all_processes_until_the_first_step(tmp_path: Path) -> None:
    found = start._start([sys.executable, "-c", STEPS], tmp_path)
    assert found.wall_s > 1.5
    assert 0.5 < found.cpu_s < 3
    assert 50 < found.memory_mib < 150


def test_a_program_that_ends_before_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended before its first step: no such recipe"):
        start._start([sys.executable, "-c", "print('no such recipe')"], tmp_path)
