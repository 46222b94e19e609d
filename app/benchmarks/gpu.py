"""ResNet-50 on one GPU, beside a hand-written loop: `python -m app.benchmarks.gpu [--out FILE]`, one call for the whole table.

Both train in bf16 with channels_last and the fused AdamW, compiled and not, on synthetic images, on photographs (JPEG, random
crops and flips, decoded by worker processes), and on these photographs packed, as `samerun data pack --max-side` shrinks them
once; each in a process of its own, in rounds in which both take turns. On synthetic images the hand-written loop has one batch
on the device and needs no feed at all, while Samerun looks its batches up in memory, copies and normalises them.

MFU, model FLOP/s utilization, is the arithmetic of the model's products over what the maker claims that the device can do
(`app/flops.py`); where that is not known the column says so. Times are wall-clock, when the device has done all it was given.
`--dry-run` runs the same on the CPU with a small model, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from app.benchmarks import turns
from app.benchmarks.bench import versions
from app.benchmarks.figures import Spread
from app.options import positive
from app.place.cores import machine
from launch.run_module import program

_HAND, _OURS = "hand-written", "samerun"
_PROGRAMS = {_HAND: "hand-written on a device", _OURS: "samerun"}
_IMAGES = ("synthetic", "photographs", "packed")
_CLASSES = 10
_PHOTOGRAPH = (500, 375)  # pixels: about the mean of ImageNet's
_DRY_RUN = {"model": "resnet18", "image_size": 32, "batch": 8, "steps": 2, "rounds": 2, "photographs": 32, "compile": ["off"]}


def main(argv: list[str]) -> int:
    """Measure, print the table as Markdown, and return 0."""
    parser = _parser()
    if parser.parse_args(argv).dry_run:
        parser.set_defaults(**_DRY_RUN)
    options = parser.parse_args(argv)
    lines = [
        f"{options.model} at {options.image_size} pixels, batch {options.batch}, bf16, channels_last, fused AdamW; "
        f"{options.rounds} rounds of {options.steps} steps, medians (quartiles)",
        "",
        "| images | compile | | images/s | MFU | of the hand-written loop |",
        "|---|---|---|---|---|---|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    with tempfile.TemporaryDirectory(prefix="samerun-gpu-") as name:
        folder = Path(name)
        photographs = folder / "photographs"
        if set(options.images) != {"synthetic"}:
            _write_photographs(photographs, options.photographs)
        if "packed" in options.images:
            _pack(photographs, folder / "packed", shorter_side=options.image_size * 8 // 7)
        (folder / "synthetic").mkdir()
        for images, compiled in itertools.product(options.images, options.compile):
            measured = _measure(images, compiled == "on", folder / images, options)
            sys.stdout.write("\n".join(measured) + "\n")
            sys.stdout.flush()  # what comes next may fail
            lines += measured
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    command = shlex.join(["python", "-m", "app.benchmarks.gpu", *argv])
    about = ["", f"`{command}`", "", f"{_device(options)}; {machine()}; {found}."]
    sys.stdout.write("\n".join(about) + "\n")
    if options.out:
        options.out.write_text("\n".join([*lines, *about, ""]))
    return 0


def _measure(images: str, compiled: bool, folder: Path, options: argparse.Namespace) -> list[str]:
    """Let both programs take turns, and return their lines of the table."""
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **(turns.ON_CPU if options.dry_run else {})}
    if compiled:
        variables["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    with ExitStack() as stack:
        contestants = {}
        for name, program in _PROGRAMS.items():
            task = {"program": program, "compiled": compiled, **_task(images, folder, options)}
            log = folder.parent / f"{images} {name}.log"
            started = turns.start(name, task, threads=options.threads, log=log, variables=variables)
            contestants[name] = stack.enter_context(started)
        for contestant in contestants.values():
            contestant.take_first_step()
            contestant.run(options.steps)
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(options.rounds):
            for name in sorted(contestants, reverse=number % 2 == 1):
                rates[name].append(1e6 * options.batch / contestants[name].run(options.steps).wall_us_per_step)
    flop_per_image, peak = _arithmetic(options)
    lines = []
    for name, found in rates.items():
        rate, share = Spread.of(found), Spread.of([own / hand for own, hand in zip(found, rates[_HAND], strict=True)])
        mfu = "unknown" if peak is None else f"{rate.median * flop_per_image / peak:.1%}"
        cells = (images, "on" if compiled else "off", name, rate.text(",.0f"), mfu, share.text(".3f"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _task(images: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    overrides = [
        f"train.global_batch_size={options.batch}",
        f"data.image_size={options.image_size}",
        f"data.resize_size={options.image_size}",
        f"data.path={folder}",
        "model.channels_last=true",
    ]
    return {
        "recipe": "imagenet_resnet50",
        "overrides": overrides,
        "model": options.model,
        "folder": str(folder),
        "shape": (3, options.image_size, options.image_size, _CLASSES),
        "augmented": images != "synthetic",
        "synthetic_samples": 4 * options.batch if images == "synthetic" else None,
    }


def _write_photographs(folder: Path, count: int) -> None:
    """Write JPEG files with the size and the coarseness of photographs, in class folders: so many to train, and a few."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count + _CLASSES):
        place = folder / ("train" if number < count else "val") / str(number % _CLASSES)
        place.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(256, size=(_PHOTOGRAPH[1] // 8, _PHOTOGRAPH[0] // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize(_PHOTOGRAPH, Image.Resampling.BICUBIC)
        picture.save(place / f"{number}.jpg", quality=90)


def _pack(photographs: Path, packed: Path, *, shorter_side: int) -> None:
    """Shrink them by `samerun data pack`. Raises CalledProcessError if that fails."""
    command = [*program("launch.cli"), "data", "pack", str(photographs), "--to", "imagefolder"]
    subprocess.run([*command, "--out", str(packed), "--max-side", str(shorter_side)], check=True, stdout=subprocess.DEVNULL)


def _arithmetic(options: argparse.Namespace) -> tuple[float, float | None]:
    """Return the floating-point operations of an image, and those a second that the device can do, if that is known."""
    import torch

    from app import flops, models
    from app.recipe import ModelRecipe

    size = (options.image_size, options.image_size)
    model = models.build(ModelRecipe(name=options.model), channels=3, image_size=size, num_classes=_CLASSES)
    device = torch.device("cpu" if options.dry_run or not torch.cuda.is_available() else "cuda")
    return flops.of_training_sample(model, channels=3, image_size=size), flops.peak_per_s(device, mixed_precision="bf16")


def _device(options: argparse.Namespace) -> str:
    import torch

    if options.dry_run or not torch.cuda.is_available():
        return "a dry run on the CPU" if options.dry_run else "no GPU: on the CPU"
    return str(torch.cuda.get_device_name())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.benchmarks.gpu", description="Measure training on one GPU.")
    parser.add_argument("--model", default="resnet50", help="of torchvision (default: resnet50)")
    parser.add_argument("--image-size", type=positive, default=224, help="side in pixels (default: 224)")
    parser.add_argument("--batch", type=positive, default=256, help="images in a step (default: 256)")
    parser.add_argument("--steps", type=positive, default=50, help="in a window (default: 50)")
    parser.add_argument("--rounds", type=positive, default=7, help="windows of each program (default: 7)")
    parser.add_argument("--threads", type=positive, default=1, help="of each process beside its workers (default: 1)")
    parser.add_argument("--images", nargs="+", choices=_IMAGES, default=list(_IMAGES), help="default: all")
    parser.add_argument("--photographs", type=positive, default=4096, help="JPEG files to make (default: 4096)")
    parser.add_argument("--compile", nargs="+", choices=("off", "on"), default=["off", "on"], help="default: off on")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: to see that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
