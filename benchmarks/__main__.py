"""`python -m benchmarks`: how fast the training loop is, compared with a hand-written one and with the installed peers.

Every program does the same work in a process of its own, and they take turns in rounds. What is measured is the CPU time of a
step (all threads of a process), after a warm-up. The limit is the hand-written loop over tensors in memory with fused AdamW.
Samerun keeps what it has of its own: the ConvNet's images in channels_last order, memory that is not freed, metrics, ledger.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from math import inf
from pathlib import Path

import numpy as np

from app.environment.host import machine
from app.options import positive
from benchmarks import contest
from benchmarks.contest import HAND, IMAGES, SAMERUN, TEXT, Entry, say, spread

PEERS = ("accelerate", "lightning", "transformers")
"""Programs, by the names of their packages. transformers' Trainer takes part with text."""
_CONVNET = ("model.name=convnet", "model.norm=identity", "model.channels=16,32", "model.hidden=256")
"""The small network of 409 thousand weights: its step is short enough that feeding and the loop show."""
_LLAMA = (
    "model.hidden_size=64", "model.layers=2", "model.heads=4", "model.intermediate_size=128", "model.vocab_size=257",
    "model.tie_embeddings=false", "data.sequence_length=64", "train.global_batch_size=8",
)  # fmt: skip
MODELS = {
    "linear": ("fashion_mnist", (*IMAGES, *_CONVNET, "train.global_batch_size=128")),
    "convnet": ("fashion_mnist", (*IMAGES, *_CONVNET, "train.global_batch_size=128")),
    "resnet18": ("fashion_mnist", (*IMAGES, "model.name=resnet18", "train.global_batch_size=128")),
    "llama": ("lm_tiny", (*TEXT, *_LLAMA)),
}
"""Recipe and overrides of each model. `linear` is one matrix, whose step shows what the loop around it costs."""


def main(argv: list[str]) -> int:
    """Measure and print a table for each model and number of threads; return 0 if no program failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n\n")[0])
    add, model_names = parser.add_argument, list(MODELS)
    add("--models", nargs="+", choices=model_names, default=model_names, metavar="MODEL", help=", ".join(model_names))
    add("--threads", type=positive, default=1, help="of each process (default: 1)")
    add("--rounds", type=positive, default=9, help="windows of each program that count (default: 9)")
    add("--steps", type=positive, default=50, help="in a window; Samerun logs every 50 (default: 50)")
    add("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER", help=f"{', '.join(PEERS)}; default: all installed")
    add("--samples", type=positive, default=60_000, help="images, or tokens divided by ten (default: 60,000)")
    options = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="samerun-bench-") as place:
        folders = {"images": Path(place, "images"), "text": Path(place, "text")}
        write_images(folders["images"], options.samples, (1, 28, 28))
        write_tokens(folders["text"], 10 * options.samples, vocabulary=257)
        for model in options.models:
            failed |= _contest(model, options, folders["text" if model == "llama" else "images"])
    say(f"{machine()}; {contest.versions()}.")
    return failed


def _contest(model: str, options: argparse.Namespace, folder: Path) -> int:
    recipe, overrides = MODELS[model]
    peers = [name for name in options.peers if importlib.util.find_spec(name) and (model == "llama" or name != "transformers")]
    names = [HAND, "hand-written", SAMERUN, *peers]
    task = {"recipe": recipe, "overrides": (*overrides, f"data.path={folder}"), "linear": model == "linear"}
    entries = {name: Entry(task={**task, "program": name}, variables=contest.ON_CPU) for name in names}
    steps, rounds, threads = options.steps, options.rounds, options.threads
    found = contest.compete(entries, steps=steps, rounds=rounds, threads=threads, folder=folder, end_s=inf)
    say(f"{model}, threads: {threads}; {found.rounds} rounds of {steps} steps, medians (quartiles)\n")
    say("| | CPU ms per step | speed, of the reference | speed, of samerun |\n|---|---|---|---|")
    for name in names:
        if name in found.failures:
            say(contest.failed_line(name, found.failures[name], columns=4))
            continue
        speeds = [contest.shares(found.cpu_us, name, other) for other in (HAND, SAMERUN)]
        cells = [spread(share, ".3f") if share else "" for share in ([us / 1e3 for us in found.cpu_us[name]], *speeds)]
        say(f"| {name} | {' | '.join(cells)} |")
    say("")
    return int(bool(found.failures))


def write_images(folder: Path, count: int, shape: tuple[int, int, int], *, classes: int = 10) -> None:
    """Write made-up images [C, H, W] as `samerun data pack --to arrays` does: one of each class to test."""
    from app.tasks.image_classification.data.arrays import Unstored, write_split

    names = tuple(map(str, range(classes)))
    for split, size in (("train", count), ("test", classes)):
        images = np.random.default_rng(size).integers(256, size=(size, *shape), dtype=np.uint8)
        write_split(folder / split, Unstored(images.shape, [images], np.arange(size) % classes, names))


def write_tokens(folder: Path, count: int, *, vocabulary: int) -> None:
    """Write a folder of made-up tokens; of a large vocabulary the first 65,536."""
    from app.tasks.causal_lm.data.token_writer import writing

    size = min(vocabulary, 1 << 16)
    about = {"kind": "made-up", "name": "made-up", "digest": None, "vocab_size": size}
    with writing(folder, about, {}, token_bytes=None) as writer:
        for split, number in (("train", count), ("validation", count // 64)):
            writer.append(split, np.random.default_rng(0).integers(size, size=number), np.array([number]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
