"""Measure a machine with a GPU, the most important results first: `make gpu`, or `python -m benchmarks.gpu --out FOLDER`.

Each part is a separate process with a time budget, and all of them together have `--minutes`. Results of a part are
in FOLDER/report.md immediately, and the output of its programs in FOLDER/output.txt: if the run is killed, finished results
stay. A part that exceeds its time is ended, with a message, and the next one begins. All budgets together are more than the
total: a later part can use the time that an earlier one did not need. They are estimates for one H200 with 16 cores
(benchmarks/RESULTS.md).

`--dry-run` goes through every part on the CPU with small models; its figures mean nothing, and the tests that need a GPU are
skipped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import BinaryIO, NamedTuple

import psutil

from app.environment.host import machine
from app.environment.slurm_variables import own_environment
from app.errors import SamerunError
from app.options import above_zero
from benchmarks import saving
from benchmarks.contest import versions
from benchmarks.gpu import images, memory, text

_REPOSITORY = Path(__file__).absolute().parents[2]
_SIZES = {
    "model": ("resnet50", "resnet18"), "image_size": (224, 32), "batch": (256, 8), "steps": (16, 2), "rounds": (4, 2),
    "small_steps": (400, 4), "photographs": (4096, 32), "state_gb": (4.0, 0.1), "minutes": (9.4, 45.0),
}  # fmt: skip
"""Sizes on a GPU, and in a dry run. A round is a window of `steps`; `photographs` are files, `state_gb` is the saved state."""
_DRY_TIMES, _LEAST_S, _MARGIN_S = 5, 20.0, 10.0
"""A part of a dry run has so many times its seconds: a CPU is slow, and DeepSpeed compiles for one. Seconds without which no
part is begun, and those before its end in which a part begins no further round."""
_PYTEST = ("-p", "xdist", "-v", "--dist", "load", "--tb", "short", "--durations", "12", "-o", "addopts=--strict-markers -rfE")
"""Without other plugins that a Python happens to have."""


def _saving(options: argparse.Namespace, folder: Path) -> int:
    return saving.main(["--state-gb", str(options.state_gb), "--rounds", "3", "--processes", "1", "--folder", str(folder)])


class Part(NamedTuple):
    """Something to do: a function that measures, or tests."""

    title: str
    budget_s: float
    measure: Callable[[argparse.Namespace, Path], int] | None = None
    tests: tuple[str, ...] = ()
    together: int = 1
    """Tests at a time: those that start processes mostly wait for imports; those that measure time run alone."""


_GPU = "tests/runs/test_gpu.py"
PARTS = {
    # pytest-xdist deals tests one by one as long as they are fewer than twice those that run together.
    "presets": Part("each preset trains, resumes, and agrees with the CPU and with itself", 160,
                    tests=("-m", "gpu and multiproc", _GPU), together=14),
    "text": Part("GPT-2 124M in bf16 compared with a hand-written loop and transformers' Trainer", 130, text.measure),
    "eager": Part("ResNet-50 in bf16 compared with a hand-written loop, AdamW and SGD", 80, images.eager),
    "text_compiled": Part("124M and 350M in eager mode, with compiled and with recomputed blocks", 130, text.compiled),
    "text_large": Part("1.3B, and as much of 8B as fits, each alone", 130, text.large),
    "memory": Part("the memory of a step compared with samerun plan", 90, memory.measure),
    "sharded": Part("ResNet-50 under the presets that shard, with one process", 80, images.sharded),
    "small": Part("overhead of the loop in a step of small models", 60, images.small),
    "photographs": Part("ResNet-50 on photographs", 90, images.on_photographs),
    "tests": Part("every other test that needs a GPU", 60, tests=("-m", "gpu and not multiproc", "tests")),
    "not_finite": Part("tests that start processes on the GPU, among them NaN at step 3 under each preset and optimizer", 150,
                       tests=("-m", "gpu and multiproc", "tests", "--ignore", _GPU), together=16),
    "saving": Part("how long a save holds the training", 45, _saving),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Do the parts; return 0 if each of them was done whole and no test failed."""
    options = _options(argv)
    if not options.measure:
        return _do_parts(argv, options)
    options.end_s, measure = time.monotonic() + options.seconds, PARTS[options.measure].measure
    assert measure is not None
    with tempfile.TemporaryDirectory(prefix="samerun-gpu-") as folder:
        return measure(options, Path(folder))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition(":")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-results"), help="folder for report.md and output.txt")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    add("--minutes", type=above_zero, help="for all of it (default: 9.4)")
    add("--dry-run", action="store_true", help="on the CPU, small: to see that it works")
    add("--measure", choices=list(PARTS), help=argparse.SUPPRESS)  # the process of one part
    add("--seconds", type=above_zero, default=600.0, help=argparse.SUPPRESS)  # that it has
    parser.set_defaults(**{name: sizes["--dry-run" in argv] for name, sizes in _SIZES.items()})
    return parser.parse_args(argv)


def _do_parts(argv: list[str], options: argparse.Namespace) -> int:
    began_s, undone = time.monotonic(), []
    heading = _heading(argv, is_dry_run=options.dry_run)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "report.md").open("w") as report, (options.out / "output.txt").open("wb") as output:

        def say(line: str) -> None:
            for file in (sys.stdout, report):
                file.write(f"{line}\n")
                file.flush()  # what comes next may be killed

        say(heading)
        for name in options.parts:
            say(f"\n## {name}: {PARTS[name].title}\n")
            part_s = time.monotonic()
            budget_s = PARTS[name].budget_s * (_DRY_TIMES if options.dry_run else 1)
            allowed_s = min(budget_s, 60 * options.minutes - (part_s - began_s))
            problem: str | None = "LEFT OUT: no time is left"
            if allowed_s >= _LEAST_S:
                problem = run(name, argv, allowed_s=allowed_s, say=say, output=output)
            say(f"\n{problem or 'Done'} ({time.monotonic() - part_s:.0f} s of {max(0.0, allowed_s):.0f}).")
            undone += [name] if problem else []
        ending = f"Not done, or not well: {', '.join(undone)}." if undone else "All parts are done."
        say(f"\n{ending} {(time.monotonic() - began_s) / 60:.1f} minutes.")
    return int(bool(undone))


def _heading(argv: Sequence[str], *, is_dry_run: bool) -> str:
    """Return what is run, where and with which versions. Raises SamerunError where there is no GPU."""

    def output_of(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if which(command[0]) else ""

    place = "A dry run on the CPU: the figures mean nothing"
    if not is_dry_run:
        place = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
        if not place:
            raise SamerunError("nvidia-smi shows no GPU: --dry-run goes through all of it on the CPU")
    commit = output_of("git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty") or "unknown"
    command = f"`python -m benchmarks.gpu {shlex.join(argv)}`"
    return f"# On a GPU\n\n{command}, commit {commit}\n\n{place}; {machine()}; {versions()}."


def run(name: str, argv: Sequence[str], *, allowed_s: float, say: Callable[[str], None], output: BinaryIO) -> str | None:
    """Run a part for so many seconds at most; return what went wrong.

    What it prints is passed to `say` as it comes, and its stderr goes to `output`. What tests measured is in a file next to
    that immediately, and passed to `say` at the end.
    """
    part, figures = PARTS[name], Path(output.name).absolute().with_name(f"{name}.txt")
    words = ["benchmarks.gpu", *argv, "--measure", name, "--seconds", f"{max(1.0, allowed_s - _MARGIN_S):.0f}"]
    variables = {**own_environment(), "PYTHONUNBUFFERED": "1"}
    if part.tests:
        together = min(part.together, len(os.sched_getaffinity(0)))
        words = ["pytest", *part.tests, *_PYTEST, "-n", str(together if together > 1 else 0), "--figures", str(figures)]
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", *words]
    output.write(f"\n== {name}: {shlex.join(command)}\n".encode())
    output.flush()

    def read() -> None:
        for line in process.stdout or ():
            say(line.decode(errors="replace").rstrip("\n"))

    with tempfile.TemporaryDirectory(prefix="samerun-gpu-", ignore_cleanup_errors=True) as folder:
        variables["TMPDIR"] = folder  # a part that is ended removes nothing
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": output}
        with subprocess.Popen(command, cwd=_REPOSITORY, env=variables, **pipes) as process:  # type: ignore[call-overload]
            reader = threading.Thread(target=read)
            reader.start()
            try:
                code = process.wait(timeout=allowed_s)
                problem = None if code == 0 else f"Ended with exit code {code}, see output.txt"
            except subprocess.TimeoutExpired:
                problem = "ENDED: its time is over"
            _kill_family(process.pid)
            reader.join()
    for line in figures.read_text().splitlines() if figures.exists() else ():
        say(f"    {line}")
    return problem


def _kill_family(pid: int) -> None:
    """Kill a process, if it still runs, and whatever it started: nothing of it may disturb what is measured next."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid)
        for each in (family, *family.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SamerunError as error:
        sys.exit(f"python -m benchmarks.gpu: {error}")
