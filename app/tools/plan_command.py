"""`samerun plan`: whether a recipe fits, under which preset, and what that costs. No GPU, no weights, no data, seconds.

samerun plan --recipe gpt3_13b --devices 8,64 --device h100
samerun plan --recipe gpt3_13b --devices 64 --device a100-40 --plot plan.png --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from app.options.values import above_zero, names, numbers, positive, share
from app.planning import devices
from launch import preset as presets


def main(argv: Sequence[str]) -> int:
    """Run `samerun plan` with these arguments; 0 if something fits on each number of devices. Raises SamerunError."""
    options = _parser().parse_intermixed_args(argv)
    from app.tools import planning  # only now torch

    return planning.main(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samerun plan",
        usage="%(prog)s [options] [key=value ...]",
        description="Say what a recipe takes of each device under each preset, which is the cheapest that fits, how much is "
        "sent in a step, and how long the training takes by the utilisation that is assumed. Needs no GPU, weights or data.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    add("--presets", type=names, default=[], help="comma-separated presets (default: all that are shipped)")
    add("--devices", type=numbers, default=[1, 8], help="comma-separated numbers of devices (default: 1,8)")
    add("--nodes-of", type=positive, default=8, metavar="N", help="devices of a node (default: 8)")
    add("--device", default="h100", help=f"its kind, of {', '.join(devices.names())}, or its memory, as 24GiB (default: h100)")
    add("--mixed-precision", choices=presets.PRECISIONS, help="default: bf16 where the device is known to have it, else no")
    add("--memory-utilization", type=share, default=0.9, metavar="SHARE", help="share of a device's memory that is planned: "
        "the CUDA context, NCCL and the allocator's fragments take the rest (default: 0.9)")  # fmt: skip
    add("--mfu", type=share, default=0.4, metavar="SHARE", help="share of the device's FLOP/s that is assumed (default: 0.4)")
    add("--disk-gb-s", type=above_zero, default=2.0, metavar="GB", help="GB/s at which a checkpoint is written, which is "
        "assumed (default: 2)")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="draw a picture, .png or .pdf: the memory by kind beside that of the device")
    add("overrides", nargs="*", metavar="key=value", help="recipe values that replace those of the file")
    return parser
