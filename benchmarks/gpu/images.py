"""Images on a GPU: ResNet-50 compared with a hand-written loop, and small models.

Both loops train in bf16 with a fused optimizer, ResNet-50 with channels_last. On made-up images the hand-written loop has one
batch on the device and needs no feed at all, while Samerun looks its batches up in a mapped file, copies and normalizes them.
Photographs are JPEG files with random crops and flips, decoded by workers.

    python -m benchmarks.gpu.images FILE

is a process that writes down its environment: what `accelerate launch` sets under a preset.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.environment.topology import Topology
from app.recipe import recipe_file
from benchmarks import contest
from benchmarks.__main__ import MODELS, write_images
from benchmarks.contest import HAND, IMAGES, SAMERUN, Entry, say, spread
from launch import preset
from launch.node_command import accelerate_argv

_CLASSES = 10
_SHARDED = {"fsdp2": 0.95, "deepspeed_zero1": 0.90, "deepspeed_zero2": 0.90, "deepspeed_zero3": 0.80}
_PHOTOGRAPH = (500, 375)  # pixels: about the mean of ImageNet's
_DIFFERENT = 256
"""Photographs with content of their own; the others are links to them."""
_SMALL_BATCH = 128


def eager(options: argparse.Namespace, folder: Path) -> int:
    """AdamW and SGD, not compiled."""
    sgd_words = ("optim.name=sgd", "optim.momentum=0.9", "optim.nesterov=true")
    entries = _pair(options, "AdamW", resnet(options, folder)) | _pair(options, "SGD", resnet(options, folder, *sgd_words))
    sgd = entries["samerun, SGD"]
    entries["samerun, SGD"] = replace(sgd, beside={**sgd.beside, "samerun, AdamW": ">= 0.99"})
    return _contest(entries, options, folder)


def sharded(options: argparse.Namespace, folder: Path) -> int:
    """Each preset that shards, with one process, compared with the hand-written loop, which knows no other."""
    entries = _pair(options, "AdamW", resnet(options, folder))
    ours, presets = entries.pop("samerun, AdamW"), variables_of(_SHARDED, folder, on_cpu=options.dry_run)
    for name, least in _SHARDED.items():
        variables = {**presets[name], **ours.variables}
        variables.pop("ACCELERATE_USE_CPU", None)  # of a dry run: Accelerate would leave DeepSpeed out
        beside = {"hand-written, AdamW": f">= {least}"}
        entries[f"samerun, {name}"] = Entry(task=ours.task, variables=variables, beside=beside)
    return _contest(entries, options, folder)


def on_photographs(options: argparse.Namespace, folder: Path) -> int:
    """JPEG files that workers decode."""
    write_photographs(folder / "photographs", options.photographs)
    pair = _pair(options, "photographs", resnet(options, folder / "photographs", photographs=True))
    return _contest(pair, options, folder)


def small(options: argparse.Namespace, folder: Path) -> int:
    """Measure the overhead of the loop in a step of one matrix, and of the small ConvNet, on gray images of 28 pixels."""
    write_images(folder / "small", 64 * _SMALL_BATCH, (1, 28, 28), classes=_CLASSES)
    entries: dict[str, Entry] = {}
    for model in ("linear", "convnet"):
        recipe, overrides = MODELS[model]
        words = (*overrides, f"data.path={folder / 'small'}")
        task = {"recipe": recipe, "overrides": words, "linear": model == "linear", "channels_last": True}
        entries |= _pair(options, model, task)
    steps, rounds = options.small_steps, options.rounds + 2
    found = contest.compete(entries, steps=steps, rounds=rounds, threads=1, folder=folder, end_s=options.end_s)
    say(f"Batches of {_SMALL_BATCH}; {found.rounds} rounds of {steps} steps.\n")
    say("| | us per step | more than the hand-written loop, us | goal |\n|---|---|---|---|")
    for name, entry in entries.items():
        if name in found.failures:
            say(contest.failed_line(name, found.failures[name], columns=4))
            continue
        own, cells = found.wall_us[name], ["", ""]
        for hand in entry.beside:
            more = [us - other for us, other in zip(own, found.wall_us[hand], strict=True)]
            cells = [spread(more, "+,.0f"), contest.verdict("<= 100", statistics.median(more))]
        say(f"| {name} | {spread(own, ',.0f')} | {' | '.join(cells)} |")
    return int(bool(found.failures))


def resnet(options: argparse.Namespace, folder: Path, *overrides: str, photographs: bool = False) -> dict[str, Any]:
    """Return the task of a program, without its name, on photographs in `folder` or on made-up images, written once."""
    if not (folder / "train").exists():
        write_images(folder, 4 * options.batch, (3, options.image_size, options.image_size), classes=_CLASSES)
    side, common = options.image_size, contest.CONSTANT if photographs else (*IMAGES, "augment.resized_crop_min_area=null")
    sizes = (f"data.image_size={side}", f"data.resize_size={side if photographs else 'null'}", f"model.name={options.model}")
    own = (*sizes, f"train.global_batch_size={options.batch}", "optim.warmup_epochs=null", "train.channels_last=true")
    words = recipe_file.replaced(recipe_file.replaced(common, own), overrides)
    words.append(f"data.path={folder}")
    return {"recipe": "imagenet_resnet50", "overrides": words, "photographs": photographs, "channels_last": True}


def _pair(options: argparse.Namespace, label: str, task: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the hand-written loop and ours."""
    hand = f"hand-written, {label}"
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **(contest.ON_CPU if options.dry_run else {})}
    theirs = Entry(task={**task, "program": HAND}, variables=variables)
    ours = Entry(task={**task, "program": SAMERUN}, variables=variables, beside={hand: ">= 0.98"})
    return {hand: theirs, f"samerun, {label}": ours}


def _contest(entries: Mapping[str, Entry], options: argparse.Namespace, folder: Path) -> int:
    """Let them compete and print their lines; return 0 if none failed."""
    logs = Path(tempfile.mkdtemp(dir=folder))
    found = contest.compete(entries, steps=options.steps, rounds=options.rounds, threads=1, folder=logs, end_s=options.end_s)
    about = f"{options.model}, {options.image_size} pixels, batch {options.batch}"
    say(f"{about}; {found.rounds} rounds of {options.steps} steps.\n")
    say("| | images/s | MFU | speed beside | goal |\n|---|---|---|---|---|")
    failed = contest.say_rates(entries, found, rows="samples", units=options.batch, on_cpu=options.dry_run)
    say("")
    return failed


def write_photographs(folder: Path, count: int, *, classes: int = _CLASSES) -> None:
    """Write JPEG files as large and as coarse as photographs: `count` to train, and one of each class to evaluate."""
    from PIL import Image

    for number in range(count + classes):
        place = folder / ("train" if number < count else "val") / str(number % classes)
        place.mkdir(parents=True, exist_ok=True)
        if number >= _DIFFERENT:
            os.link(folder / f"train/{number % _DIFFERENT % classes}/{number % _DIFFERENT}.jpg", place / f"{number}.jpg")
            continue
        coarse = np.random.default_rng(number).integers(256, size=(_PHOTOGRAPH[1] // 8, _PHOTOGRAPH[0] // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(_PHOTOGRAPH, Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)


def variables_of(names: Iterable[str], folder: Path, *, on_cpu: bool) -> dict[str, dict[str, str]]:
    """Return what real launches of one process under these presets add to this process's environment, with a rendezvous."""
    topology = Topology(processes_per_node=1, origins={"processes_per_node": "one GPU"})
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})}
    found = {}
    for name in names:
        file = folder / f"{name}.json"
        command = accelerate_argv(topology, preset.load(name), [str(file)], module="benchmarks.gpu.images")
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        added = {key: value for key, value in json.loads(file.read_text()).items() if environment.get(key) != value}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))  # the launcher's own store has ended with it
            found[name] = {**added, "MASTER_PORT": str(probe.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dict(os.environ)))
