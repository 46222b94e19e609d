"""The cost of reaching the first step of one process: `python -m benchmarks.start [--rounds N]`.

A plain script by itself, the same under `accelerate launch`, and `samerun launch`, in turns. Each is watched until it prints
that its first step is over, and then ended: seconds of wall-clock time, and CPU seconds of all its processes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from app.environment.host import machine
from app.options import positive
from benchmarks.contest import environment, spread
from launch.run_module import ACCELERATE, program

_ROOT = Path(__file__).parent.parent
_FIRST_STEP = re.compile(rb"\bstep 1/\d+")


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="starts of each that count (default: 5)")
    options = parser.parse_args(argv)
    starts: dict[str, list[tuple[float, float]]] = {}
    for number in range(options.rounds + 1):  # the first one brings the files into the memory
        with tempfile.TemporaryDirectory() as folder:
            for name, command in _programs(folder).items():
                starts.setdefault(name, []).extend([start(command)] if number else [])
    for name, figures in starts.items():
        wall, cpu = zip(*figures, strict=True)
        sys.stdout.write(f"{name:<45} {spread(wall, '.2f')} s, {spread(cpu, '.2f')} CPU s\n")
    sys.stdout.write(f"{machine()}\n")


def _programs(folder: str) -> dict[str, list[str]]:
    """Return the command of each program."""
    script = [str(Path(__file__).with_name("plain_start.py")), f"{folder}/log"]
    by_accelerate = [sys.executable, "-m", ACCELERATE, "--config_file", str(_ROOT / "accelerate_configs" / "cpu.yaml"), *script]
    words = ["launch", "--preset", "cpu", "--recipe", "digits", "log.every_steps=1", "--run-dir", f"{folder}/run"]
    return {
        "a plain script": [sys.executable, *script],
        "the same under accelerate launch": by_accelerate,
        "samerun launch": [*program("launch.cli"), *words],
    }


def start(command: list[str]) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a program until its first step is over, and end it.

    Raises RuntimeError if it ends before.
    """
    variables = environment(1, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_ROOT)})
    began_s, output, cpu_s = time.perf_counter(), b"", 0.0
    with subprocess.Popen(command, env=variables, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if _FIRST_STEP.search(line):
                break
        wall_s = time.perf_counter() - began_s
        with suppress(psutil.NoSuchProcess):  # one that has ended by itself
            root_process = psutil.Process(process.pid)
            for each in (root_process, *root_process.children(recursive=True)):
                times = each.cpu_times()
                cpu_s += times.user + times.system + times.children_user + times.children_system
                each.kill()
    if not _FIRST_STEP.search(output):
        raise RuntimeError(f"{' '.join(command)} ended before its first step: {output.decode(errors='replace')}")
    return wall_s, cpu_s


if __name__ == "__main__":
    main(sys.argv[1:])
