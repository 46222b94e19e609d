"""What it costs to come to the first step of one process: `python -m benchmarks.start [--rounds N] [--beside CHECKOUT]`.

A plain script by itself, the same under `accelerate launch`, and `samerun launch`, in turns. Each is looked at until it says
that its first step is over, and then ended: seconds of wall-clock time, CPU seconds of all its processes, and the most memory
that they had together, in which what several share counts once (Pss of proc(5)).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.options.values import positive
from app.place.cores import machine
from benchmarks import contestants
from benchmarks.figures import Spread
from launch.run_module import ACCELERATE, program

_ROOT = Path(__file__).parent.parent
_FIRST_STEP = re.compile(rb"\bstep 1/\d+")
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Start:
    """What it cost until its first step was over."""

    wall_s: float
    cpu_s: float
    memory_mib: float


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="starts of each that count (default: 5)")
    parser.add_argument("--beside", metavar="CHECKOUT", help="another checkout, whose `samerun launch` takes part")
    options = parser.parse_args(argv)
    found: dict[str, list[Start]] = {}
    for number in range(options.rounds + 1):  # the first one brings the files into the memory
        with tempfile.TemporaryDirectory() as folder:
            for name, (command, root) in _programs(folder, options.beside).items():
                measured = _start(command, root)
                found.setdefault(name, []).extend([measured] if number else [])
    for name, starts in found.items():
        spreads = (
            (Spread.of([getattr(start, field) for start in starts]).text(form), unit)
            for field, form, unit in (("wall_s", ".2f", "s"), ("cpu_s", ".2f", "CPU s"), ("memory_mib", ".0f", "MiB"))
        )
        sys.stdout.write(f"{name:<45} {', '.join(f'{text} {unit}' for text, unit in spreads)}\n")
    sys.stdout.write(f"{machine()}\n")


def _programs(folder: str, beside: str | None) -> dict[str, tuple[list[str], Path]]:
    script = [str(Path(__file__).with_name("plain_start.py")), f"{folder}/log"]
    by_accelerate = [sys.executable, "-m", ACCELERATE, "--config_file", str(_ROOT / "accelerate_configs" / "cpu.yaml"), *script]
    words = ["launch", "--preset", "cpu", "--recipe", "digits", "log.every_steps=1", "--run-dir"]
    found = {
        "a plain script": ([sys.executable, *script], _ROOT),
        "the same under accelerate launch": (by_accelerate, _ROOT),
        "samerun launch": ([*program("launch.cli"), *words, f"{folder}/run"], _ROOT),
    }
    if beside:
        other = Path(beside).resolve()
        of_it = [sys.executable, str(other / "launch" / "run_module.py"), "launch.cli", *words, f"{folder}/other"]
        found[f"samerun launch of {beside}"] = (of_it, other)
    return found


def _start(command: list[str], root: Path) -> Start:
    """Start it, see it through its first step, and end it. Raises RuntimeError if it ends before."""
    (environment,) = contestants.environments(1, 1, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)})
    began_s = time.perf_counter()
    with subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        reading = _Reading(process)
        root_process, peak = psutil.Process(process.pid), 0.0
        while not reading.is_over.wait(_LOOK_EVERY_S):
            peak = max(peak, sum(_pss_mib(each) for each in _all(root_process)))
        wall_s = reading.over_s - began_s
        everything = _all(root_process)
        cpu_s, peak = sum(_cpu_s(each) for each in everything), max(peak, sum(_pss_mib(each) for each in everything))
        for each in everything:
            with suppress(psutil.Error):
                each.kill()
    if not reading.has_stepped:
        raise RuntimeError(f"{' '.join(command)} ended before its first step: {reading.output.decode(errors='replace')}")
    return Start(wall_s, cpu_s, peak)


class _Reading(threading.Thread):
    """Reads what a process says, until its first step."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self._process, self.output = process, b""
        self.is_over, self.has_stepped, self.over_s = threading.Event(), False, 0.0
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if not self.has_stepped and _FIRST_STEP.search(line):
                self.has_stepped, self.over_s = True, time.perf_counter()
                self.is_over.set()
        self.is_over.set()


def _all(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [root, *root.children(recursive=True)]
    return []


def _pss_mib(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(process.memory_full_info().pss) / 2**20
    return 0.0


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


if __name__ == "__main__":
    main(sys.argv[1:])
