"""What a start costs, as `python -m benchmarks.start` measures it, of a program whose cost is known."""

from __future__ import annotations

import sys

import pytest

from benchmarks import start

STEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(1)
began_s = time.process_time()
while time.process_time() < began_s + 0.5:
    pass
print("step 1/9  loss 2.3", flush=True)
time.sleep(60)
"""


def test_time_and_cpu_time_are_those_of_all_processes_until_the_first_step() -> None:
    wall_s, cpu_s = start.start([sys.executable, "-c", STEPS])
    assert wall_s > 1.5
    assert 0.5 < cpu_s < 3


def test_a_program_that_ends_before_is_no_start() -> None:
    with pytest.raises(RuntimeError, match="ended before its first step: no such recipe"):
        start.start([sys.executable, "-c", "print('no such recipe')"])
