"""ResNet-50 beside a hand-written loop: eager and compiled, AdamW and SGD, under presets that shard, and on photographs.

Both train in bf16 with channels_last and a fused optimizer. On synthetic images the hand-written loop has one batch on the
device and needs no feed at all, while Samerun looks its batches up in memory, copies and normalizes them. Photographs are JPEG
files with random crops and flips, decoded by worker processes; packed ones are what `samerun data pack --max-side` makes of
them once.

MFU, model FLOP/s utilization, is the arithmetic of the model's products over what the maker claims that the device can do
(`app/metrics/flops.py`); where that is not known the column says so.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import contestants
from benchmarks.figures import Spread
from benchmarks.gpu import photographs, shipped
from benchmarks.gpu.contest import HAND, OURS, Entry, Goal, compared, compete, failed_line, say
from benchmarks.gpu.presets import variables_of

_HAND, _OURS = "hand-written", "samerun"
_CLASSES = 10
_ADAMW = ("optim.name=adamw",)
_SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.nesterov=true")
_GOAL = Goal(least=0.98)
_SHARDED = {
    "fsdp2": Goal(least=0.95),
    "deepspeed_zero1": Goal(least=0.90),
    "deepspeed_zero2": Goal(least=0.90),
    "deepspeed_zero3": Goal(least=0.80),
}


def eager(options: argparse.Namespace, folder: Path) -> int:
    """AdamW and SGD, as they are."""
    entries = {**_pair(options, folder, "AdamW", _ADAMW), **_pair(options, folder, "SGD", _SGD)}
    sgd = entries[f"{_OURS}, SGD"]
    entries[f"{_OURS}, SGD"] = replace(sgd, beside={**sgd.beside, f"{_OURS}, AdamW": Goal(least=0.99)})
    return _contest(entries, options, folder)


def compiled(options: argparse.Namespace, folder: Path) -> int:
    """Both loops compiled; not in a dry run, in which it would take a minute."""
    return _contest(_pair(options, folder, "AdamW, compiled", _ADAMW, compiled=not options.dry_run), options, folder)


def sharded(options: argparse.Namespace, folder: Path) -> int:
    """Each preset that shards, with one process, beside the hand-written loop, which knows of no other."""
    entries = _pair(options, folder, "AdamW", _ADAMW)
    (hand, _), (_, ours) = entries.items()
    presets = variables_of(list(_SHARDED), folder=folder, on_cpu=options.dry_run)
    for preset, goal in _SHARDED.items():
        variables = {**presets[preset], **ours.variables}
        variables.pop("ACCELERATE_USE_CPU", None)  # of a dry run: Accelerate would leave DeepSpeed out
        entries[f"{_OURS}, {preset}"] = replace(ours, variables=variables, beside={hand: goal})
    del entries[f"{_OURS}, AdamW"]
    return _contest(entries, options, folder)


def on_photographs(options: argparse.Namespace, folder: Path) -> int:
    """As they are, and what the recipe as it is shipped waits for them."""
    written = folder / "photographs"
    photographs.write(written, options.photographs, classes=_CLASSES)
    failed = _contest(_pair(options, written, "photographs", _ADAMW, made_up=False), options, folder)
    return failed | shipped.run(options, folder / "run", (f"data.path={written}",))


def packed(options: argparse.Namespace, folder: Path) -> int:
    """The same photographs, packed once."""
    written, smaller = folder / "photographs", folder / "packed"
    photographs.write(written, options.photographs, classes=_CLASSES)
    photographs.pack(written, smaller, shorter_side=options.image_size * 8 // 7)
    return _contest(_pair(options, smaller, "packed", _ADAMW, made_up=False), options, folder)


def _pair(
    options: argparse.Namespace,
    folder: Path,
    what: str,
    optimizer: Sequence[str],
    *,
    made_up: bool = True,
    compiled: bool = False,
) -> dict[str, Entry]:
    """Return the hand-written loop and ours, on photographs in `folder` or on images that are made up and in memory."""
    task = {
        "recipe": "imagenet_resnet50",
        "overrides": [
            f"train.global_batch_size={options.batch}",
            f"data.image_size={options.image_size}",
            f"data.resize_size={options.image_size}",
            f"data.path={folder}",
            "train.channels_last=true",
            *optimizer,
        ],
        "model": options.model,
        "folder": str(folder),
        "shape": (3, options.image_size, options.image_size, _CLASSES),
        "augmented": not made_up,
        "synthetic_samples": 4 * options.batch if made_up else None,
        "compiled": compiled,
    }
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **(contestants.ON_CPU if options.dry_run else {})}
    ours = {**variables, **({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"} if compiled else {})}
    hand = f"{_HAND}, {what}"
    return {
        hand: Entry(task={**task, "program": HAND}, variables=variables),
        f"{_OURS}, {what}": Entry(task={**task, "program": OURS}, variables=ours, beside={hand: _GOAL}),
    }


def _contest(entries: Mapping[str, Entry], options: argparse.Namespace, folder: Path) -> int:
    """Let them compete and print their lines; return 0 if none failed."""
    logs = Path(tempfile.mkdtemp(dir=folder))
    found = compete(
        entries, steps=options.steps, rounds=options.rounds, threads=options.threads, folder=logs, end_s=options.end_s
    )
    flop_per_image, peak = _arithmetic(options)
    rounds = max(map(len, found.wall_us.values()), default=0)
    say(f"{options.model}, {options.image_size} pixels, batch {options.batch}; {rounds} rounds of {options.steps} steps.\n")
    say("| | images/s | MFU | speed beside | goal |\n|---|---|---|---|---|")
    for name, entry in entries.items():
        if name in found.failures:
            say(failed_line(name, found.failures[name], columns=5))
        if wall_us := found.wall_us.get(name):
            rate = Spread.of([1e6 * options.batch / each for each in wall_us])
            mfu = "unknown" if peak is None else f"{rate.median * flop_per_image / peak:.1%}"
            say(f"| {name} | {rate.text(',.0f')} | {mfu} | {' | '.join(compared(name, entry, found))} |")
    say("")
    return int(bool(found.failures))


def _arithmetic(options: argparse.Namespace) -> tuple[float, float | None]:
    """Return the floating-point operations of an image, and those a second that the device can do, if that is known."""
    import torch

    from app.metrics import flops
    from app.tasks.image_classification import models
    from app.tasks.image_classification.sections import ModelRecipe

    size = (options.image_size, options.image_size)
    model = models.build(ModelRecipe(name=options.model), channels=3, image_size=size, num_classes=_CLASSES)
    device = torch.device("cpu" if options.dry_run else "cuda")
    images = torch.empty(2, 3, *size, device="meta")
    return flops.of_training(model, lambda called: called(images)) / len(images), flops.peak_per_s(
        device, mixed_precision="bf16"
    )
