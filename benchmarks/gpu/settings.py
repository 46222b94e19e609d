"""The options of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from app.options.values import above_zero, positive

DRY_RUN = {
    "model": "resnet18", "image_size": 32, "batch": 8, "steps": 2, "rounds": 2, "small_steps": 4, "photographs": 32,
    "state_gb": 0.1, "minutes": 45.0,
}  # fmt: skip


def parser(parts: Sequence[str]) -> argparse.ArgumentParser:
    """Return that of the command, whose parts have these names."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What a machine with a GPU has to show, the most important first."
    )
    made.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for report.md and output.txt")
    made.add_argument("--parts", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts))
    made.add_argument("--minutes", type=above_zero, default=7.8, help="for all of it (default: 7.8)")
    made.add_argument("--model", default="resnet50", help="of torchvision (default: resnet50)")
    made.add_argument("--image-size", type=positive, default=224, help="side in pixels (default: 224)")
    made.add_argument("--batch", type=positive, default=256, help="images in a step (default: 256)")
    made.add_argument("--steps", type=positive, default=16, help="in a window (default: 16)")
    made.add_argument("--rounds", type=positive, default=4, help="windows of each program (default: 4)")
    made.add_argument("--small-steps", type=positive, default=400, help="in a window of small models (default: 400)")
    made.add_argument("--threads", type=positive, default=1, help="of each process beside its workers (default: 1)")
    made.add_argument("--photographs", type=positive, default=4096, help="JPEG files to make (default: 4096)")
    made.add_argument("--state-gb", type=above_zero, default=4.0, help="weights and moments that are saved (default: 4)")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, small: to see that it works")
    made.add_argument("--measure", choices=parts, help=argparse.SUPPRESS)  # the process of one part
    made.add_argument("--seconds", type=above_zero, default=600.0, help=argparse.SUPPRESS)  # that it has
    return made
