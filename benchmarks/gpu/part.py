"""The parts of `make gpu`, and how one is run: in a process of its own, for so many seconds at most.

All budgets together are more than the whole may take: what one part leaves over, a later one may need. The minutes that they
were made from are estimates for one H200 with 16 cores (docs/performance-gpu.md).
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import psutil

from app.place.inherited import own_environment

_REPOSITORY = Path(__file__).absolute().parents[2]
_MARGIN_S = 10.0
"""Seconds before its end in which a part begins no further round."""
_PYTEST = ("-p", "xdist", "-v", "--dist", "load", "--tb", "short", "--durations", "12", "-o", "addopts=--strict-markers -rfE")
"""Without other plugins that a Python happens to have."""
_VERDICT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b|^=.* in [\d.]+s")


@dataclass(frozen=True)
class Part:
    """Something to do."""

    title: str
    budget_s: float
    tests: tuple[str, ...] | None = None
    """What pytest is asked for. None: it is measured by `benchmarks.gpu --measure NAME`."""
    together: int = 1
    """Tests at a time: those that start processes mostly wait for imports; those that measure time run alone."""


PARTS = {
    "presets": Part(
        "each preset trains, goes on, and agrees with the CPU and with itself",
        120,
        tests=("-m", "gpu and multiproc", "tests/runs/test_gpu.py"),
        together=14,  # pytest-xdist deals them one by one as long as they are fewer than twice that
    ),
    "text": Part("GPT-2 124M in bf16 beside a hand-written loop and transformers' Trainer", 130),
    "eager": Part("ResNet-50 in bf16 beside a hand-written loop, AdamW and SGD", 80),
    "text_large": Part("350M, 1.3B, and as much of 8B as fits, each alone", 180),
    "memory": Part("the memory of a step beside what samerun plan says", 90),
    "compiled": Part("ResNet-50 beside a hand-written loop, both compiled", 120),
    "recipe": Part("the recipe imagenet_resnet50 as it is shipped, on made-up images", 60),
    "sharded": Part("ResNet-50 under the presets that shard, with one process", 80),
    "small": Part("what the loop costs a step of small models", 60),
    "photographs": Part("ResNet-50 on photographs", 90),
    "tests": Part("every other test that needs a GPU", 60, tests=("-m", "gpu and not multiproc", "tests")),
    "not_finite": Part(
        "tests that start processes on the GPU, among them NaN at step 3 under each preset and optimizer",
        90,
        tests=("-m", "gpu and multiproc", "tests", "--ignore", "tests/runs/test_gpu.py"),
        together=10,
    ),
    "saving": Part("how long a save holds the training", 45),
    "packed": Part("ResNet-50 on the photographs as `samerun data pack` shrinks them once", 60),
}


def run(name: str, argv: Sequence[str], *, allowed_s: float, say: Callable[[str], None], output: BinaryIO) -> str | None:
    """Run a part for so many seconds at most; return what went wrong.

    The lines of its table are said as they come, and so are the verdicts of tests; all else goes to `output`. What tests
    measured is in a file beside that at once, and said at the end.
    """
    tests, program = PARTS[name].tests, [sys.executable, "-m"]
    figures = Path(output.name).absolute().with_name(f"{name}.txt")
    words = ["benchmarks.gpu", *argv, "--measure", name, "--seconds", f"{max(1.0, allowed_s - _MARGIN_S):.0f}"]
    variables = {"PYTHONUNBUFFERED": "1"}
    if tests is not None:
        together = min(PARTS[name].together, len(os.sched_getaffinity(0)))
        words = ["pytest", *tests, *_PYTEST, "-n", str(together if together > 1 else 0), "--figures", str(figures)]
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    output.write(f"\n== {name}: {shlex.join(program + words)}\n".encode())
    output.flush()
    with tempfile.TemporaryDirectory(prefix="samerun-gpu-", ignore_cleanup_errors=True) as folder:
        variables["TMPDIR"] = folder  # a part that is ended removes nothing
        read = functools.partial(_read, say=say, output=None if tests is None else output)
        problem = _run([*program, *words], variables, allowed_s, read, output)
    for line in figures.read_text().splitlines() if figures.exists() else ():
        say(f"    {line}")
    return problem


def _run(
    command: Sequence[str], variables: Mapping[str, str], allowed_s: float, read: Callable[[IO[bytes]], None], errors: BinaryIO
) -> str | None:
    """Run a command, with a thread that reads what it prints; return what went wrong."""
    environment = {**own_environment(), **variables}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
    process = subprocess.Popen(command, cwd=_REPOSITORY, env=environment, **pipes)  # type: ignore[call-overload]
    reader = threading.Thread(target=read, args=(process.stdout,))
    reader.start()
    try:
        code = process.wait(timeout=allowed_s)
        return None if code == 0 else f"Ended with exit code {code}, see output.txt"
    except subprocess.TimeoutExpired:
        return "ENDED: its time is over"
    finally:
        _end(process)
        reader.join()


def _read(lines: IO[bytes], say: Callable[[str], None], output: BinaryIO | None) -> None:
    """Say every line; with an `output` to write them to, only the verdicts of tests."""
    with lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\n")
            if output is None:
                say(text)
                continue
            output.write(line)
            output.flush()
            if _VERDICT.search(text):
                say(f"    {text}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, if it still runs, and whatever it started: nothing of it may disturb what is measured next."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for each in (family, *family.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()
