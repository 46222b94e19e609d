"""The options of `python -m benchmarks.gpu`, and its sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from app.options.values import above_zero, positive

_WHOLE = {
    "model": "resnet50", "image_size": 224, "batch": 256, "steps": 16, "rounds": 4, "small_steps": 400, "threads": 1,
    "photographs": 4096, "state_gb": 4.0, "minutes": 9.4,
}  # fmt: skip
"""Steps are those of a window, rounds the windows of each program, threads those of a process beside its workers, photographs
JPEG files that are made, and the state is what is saved: weights and moments."""
_DRY_RUN = {
    "model": "resnet18", "image_size": 32, "batch": 8, "steps": 2, "rounds": 2, "small_steps": 4, "photographs": 32,
    "state_gb": 0.1, "minutes": 45.0,
}  # fmt: skip


def read(parts: Sequence[str], argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says, whose parts have these names, and the sizes that go with it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What a machine with a GPU has to show, the most important first."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for report.md and output.txt")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts))
    parser.add_argument("--minutes", type=above_zero, help="for all of it (default: 9.4)")
    parser.add_argument("--batch", type=positive, help="images in a step of large models (default: 256)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: to see that it works")
    parser.add_argument("--measure", choices=parts, help=argparse.SUPPRESS)  # the process of one part
    parser.add_argument("--seconds", type=above_zero, default=600.0, help=argparse.SUPPRESS)  # that it has
    parser.set_defaults(**_WHOLE)
    if parser.parse_args(argv).dry_run:
        parser.set_defaults(**_DRY_RUN)
    return parser.parse_args(argv)
