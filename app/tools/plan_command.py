"""`samerun plan`: whether a recipe fits, under which preset, and what that costs. No GPU, no weights, no data, seconds.

samerun plan --recipe gpt3_13b --devices 8,64 --device h100
samerun plan --recipe gpt3_13b --devices 64 --device a100-40 --plot plan.png --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from app.options.command_line import Parser
from app.options.values import above_zero, names, numbers, positive, share
from app.planning import devices
from launch import preset as presets


def main(argv: Sequence[str]) -> int:
    """Run `samerun plan` with these arguments; 0 if something fits. Raises SamerunError."""
    options = _parser().parse_all(argv)
    from app.tools import planning  # only now torch

    return planning.main(options)


def _parser() -> Parser:
    parser = Parser(
        prog="samerun plan",
        usage="%(prog)s [options] [key=value ...]",
        description="Estimate, for each preset, the memory per device and the communication per step of a recipe; name the "
        "cheapest preset that fits; and estimate the training time from an assumed utilisation. Needs no GPU, weights or "
        "data.",
    )
    add = parser.add_argument
    add("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    add("--presets", type=names, default=[], help="presets, comma-separated (default: all shipped presets)")
    add("--devices", type=numbers, default=[1, 8], help="numbers of devices, comma-separated (default: 1,8)")
    add("--nodes-of", type=positive, default=8, metavar="N", help="devices per node (default: 8)")
    add(
        "--device",
        default="h100",
        help=f"kind of device: {', '.join(devices.names())}; or its memory, such as 24GiB (default: h100)",
    )
    add(
        "--mixed-precision",
        choices=presets.PRECISIONS,
        help="precision (default: bf16 if the device is known to support it, else no)",
    )
    add("--host-memory", type=_size, metavar="SIZE", help="host memory of a node, such as 512GiB, into which offloaded state "
        "must fit (default: unknown; the plan then only shows what is needed)")  # fmt: skip
    add("--memory-utilization", type=share, default=0.9, metavar="SHARE", help="share of a device's memory, and of a node's "
        "host memory, to plan with; the rest is for the CUDA context, NCCL and fragmentation (default: 0.9)")  # fmt: skip
    add(
        "--mfu",
        type=share,
        default=0.4,
        metavar="SHARE",
        help="assumed utilisation: model FLOP/s as a share of the device's peak (default: 0.4)",
    )
    add("--disk-gb-s", type=above_zero, default=2.0, metavar="GB", help="assumed speed of writing a checkpoint, in GB/s "
        "(default: 2)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--plot", metavar="FILE", help="plot the memory by kind against the device's memory, as .png or .pdf")
    add("overrides", nargs="*", metavar="key=value", help="recipe values that override the file's")
    return parser


def _size(text: str) -> int:
    if not (size := devices.size_of(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size, such as 512GiB")
    return size
