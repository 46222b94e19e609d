"""What a machine with a GPU has to show, the most important first: `make gpu`, or `python -m benchmarks.gpu --out FOLDER`.

Each part is a process of its own with a number of seconds, and all of them together have `--minutes`. What a part has found is
in FOLDER/report.md at once, and what its programs said in FOLDER/output.txt: a run that is killed has left what was done. A
part that needs more than its time is ended, that is said, and the next one begins.

Programs are compared in rounds in which they take turns, each in a process of its own. What is said of a program are medians
(quartiles), and its speed beside another one's in the same round. Times are wall-clock, when the device has done all it was
given. `--dry-run` goes through every part on the CPU with small models; its figures mean nothing, and the tests that need a GPU
are skipped.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from app.errors import SamerunError
from app.place.cores import machine
from benchmarks import saving
from benchmarks.figures import versions
from benchmarks.gpu import memory, resnet, settings, shipped, small, text
from benchmarks.gpu.part import PARTS, run

_MEASURED: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "text": text.measure,
    "text_large": text.large,
    "memory": memory.measure,
    "eager": resnet.eager,
    "compiled": resnet.compiled,
    "recipe": shipped.measure,
    "sharded": resnet.sharded,
    "small": small.measure,
    "photographs": resnet.on_photographs,
    "packed": resnet.packed,
    "saving": lambda options, folder: saving.main(
        ["--state-gb", str(options.state_gb), "--rounds", "3", "--processes", "1", "--times-only", "--folder", str(folder)]
    ),
}
_LEAST_S = 20.0
"""With less than this no part is begun."""
_DRY_TIMES = 5
"""A part of a dry run has so many times its seconds: a CPU is slow, and DeepSpeed compiles for one."""
_FACTS = """
import torch
if not torch.cuda.is_available():
    raise SystemExit("no GPU: --dry-run goes through all of it on the CPU")
found = torch.cuda.get_device_properties(0)
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
      f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
"""


def main(argv: list[str]) -> int:
    """Do the parts; return 0 if each of them was done whole and no test failed."""
    options = settings.read(list(PARTS), argv)
    return _measure(options) if options.measure else _do_parts(argv, options)


def _measure(options: argparse.Namespace) -> int:
    """Do one part: this is its own process."""
    options.end_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="samerun-gpu-") as folder:
        return _MEASURED[options.measure](options, Path(folder))


def _do_parts(argv: list[str], options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    heading = _heading(argv, is_dry_run=options.dry_run)
    options.out.mkdir(parents=True, exist_ok=True)
    undone = []
    with (options.out / "report.md").open("w") as report, (options.out / "output.txt").open("wb") as output:

        def say(line: str) -> None:
            for file in (sys.stdout, report):
                file.write(f"{line}\n")
                file.flush()  # what comes next may be killed

        for line in heading:
            say(line)
        for name in options.parts:
            say(f"\n## {name}: {PARTS[name].title}\n")
            part_s = time.monotonic()
            budget_s = PARTS[name].budget_s * (_DRY_TIMES if options.dry_run else 1)
            allowed_s = min(budget_s, 60 * options.minutes - (part_s - began_s))
            enough = allowed_s >= _LEAST_S
            problem = run(name, argv, allowed_s=allowed_s, say=say, output=output) if enough else "LEFT OUT: no time is left"
            say(f"\n{problem or 'Done'} ({time.monotonic() - part_s:.0f} s of {max(0.0, allowed_s):.0f}).")
            undone += [name] if problem else []
        say(f"\n{_ending(undone)} {(time.monotonic() - began_s) / 60:.1f} minutes.")
    return int(bool(undone))


def _heading(argv: Iterable[str], *, is_dry_run: bool) -> list[str]:
    """Say what is run, where and with which versions. Raises SamerunError where there is no GPU."""
    place = "A dry run on the CPU: the figures mean nothing"
    if not is_dry_run:
        asked = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=False)
        if asked.returncode:
            raise SamerunError(asked.stderr.strip().splitlines()[-1])
        place = f"{asked.stdout.strip()}, driver {_said(['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'])}"
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    commit = _said(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])
    words = shlex.join(["python", "-m", "benchmarks.gpu", *argv])
    return ["# On a GPU", "", f"`{words}`, commit {commit}", "", f"{place}; {machine()}; {found}."]


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _ending(undone: list[str]) -> str:
    return f"Not done, or not well: {', '.join(undone)}." if undone else "All parts are done."


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SamerunError as error:
        sys.exit(f"python -m benchmarks.gpu: {error}")
