"""Language models in bf16 beside a hand-written loop and transformers' Trainer, with and without computing layers again.

The sizes are those of the shipped recipes, with a vocabulary of 50,304 for GPT-2's (as nanoGPT fills it up) and Llama 3's own;
the tokens are made up. What is compared at GPT-2 124M takes turns on the device. Of larger models each program has the device
alone, and Llama 3 8B has as many of its 32 layers as a plan says fit.

Samerun as it is shipped computes logits of so large a vocabulary by chunks, and once more in the backward pass, which saves
most of their memory: the hand-written loop and the Trainer hold them whole, and so does Samerun where it says so. MFU does not
count what is computed again; attention counts in full (`app/metrics/flops.py`).
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.place.inherited import own_environment
from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from benchmarks import contestants
from benchmarks.figures import Spread
from benchmarks.gpu.contest import Entry, Found, Goal, compared, compete, failed_line, say

HAND, OURS, TRAINER = "hand-written", "samerun", "transformers' Trainer"
_WHOLE = "samerun, whole logits"
_CASE = "benchmarks.gpu.text_case"
_PUBLISHED = (
    ("Llama 3 8B, 1 H200, rows of 4096, all layers computed again", "10,471", "57.8 %", "KempnerForge"),
    ("Llama 3 8B, 8 H100, FSDP2 (compiled: 6,667)", "5,762", "", "torchtitan"),
    ("MPT 1.3B, 8 H100", "45,455", "41.8 %", "llm-foundry"),
    ("nanochat d26, 8 H100", "79,000", "", "nanochat"),
    ("GPT-2 124M, H100", "about 58,000", "", "llm.c"),
)
_LEAST_S = 30.0
"""With less than this nothing that is left is begun."""
_SHARE_OF_DEVICE = 0.8
"""Of its memory, for what a plan counts: the hand-written loop's whole logits need more, and so do the libraries."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model and its batch."""

    name: str
    recipe: str
    vocabulary: int
    rows: int
    length: int
    overrides: tuple[str, ...] = ()

    def load(self, *more: str) -> LoadedRecipe:
        """Return the recipe, without its text."""
        return recipe_file.load(self.recipe, [*self.words(), f"data.sequence_length={self.length}", *more])

    def words(self) -> tuple[str, ...]:
        """Return what is said of the recipe."""
        return (*self.overrides, f"model.vocab_size={self.vocabulary}")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


GPT2_124M = Network(name="GPT-2 124M", recipe="gpt2_124m", vocabulary=50304, rows=8, length=1024)
GPT3_350M = Network(name="GPT-3 350M", recipe="gpt3_350m", vocabulary=50304, rows=4, length=2048)
GPT3_1_3B = Network(name="GPT-3 1.3B", recipe="gpt3_1_3b", vocabulary=50304, rows=4, length=2048)
LLAMA3_8B = Network(
    name="Llama 3 8B", recipe="llama3_8b", vocabulary=128256, rows=1, length=4096, overrides=("data.document_masks=false",)
)
_LARGE = (
    (GPT3_350M, "none"),
    (GPT3_1_3B, "blocks"),
    (LLAMA3_8B, "blocks"),
    (GPT3_1_3B, "none"),
    (GPT3_350M, "blocks"),
    (LLAMA3_8B, "none"),
)


def small_like(network: Network) -> Network:
    """Return one for a dry run."""
    sizes = ["model.hidden_size=64", "model.layers=2", "model.heads=4"]
    if "llama" in network.recipe:
        sizes += ["model.key_value_heads=2", "model.intermediate_size=128"]
    overrides = (*network.overrides, *sizes)
    return replace(network, vocabulary=4096, rows=2, length=32, overrides=overrides)  # a head that goes by chunks


def measure(options: argparse.Namespace, folder: Path) -> int:
    """GPT-2 124M: all programs in turns, layers kept and computed again."""
    network = small_like(GPT2_124M) if options.dry_run else GPT2_124M
    failed = 0
    for again in ("none", "blocks"):
        entries = _entries(network, again, folder, options, (HAND, _WHOLE, OURS, TRAINER))
        found = _compete(entries, options, folder, steps=options.steps, rounds=options.rounds)
        _say_head(f"{_about(network, again)}; {_rounds(found)} rounds of {options.steps} steps.")
        failed |= _say_rows(network, entries, found, options)
        say("")
    _say_head("Published, by others on other machines, to stand beside; a GPU each, bf16.", columns=("MFU", "source"))
    for row in _PUBLISHED:
        say(f"| {' | '.join(row)} |")
    say("")
    return failed


def large(options: argparse.Namespace, folder: Path) -> int:
    """350M, 1.3B, and as much of 8B as fits: the hand-written loop and ours, each alone on the device."""
    failed, left_out = 0, []
    rounds, steps = min(3, options.rounds), max(2, options.steps // 4)
    _say_head(f"Each program alone; up to {rounds} windows of {steps} steps.")
    for of_paper, again in _LARGE:
        if time.monotonic() + _LEAST_S > options.end_s:
            left_out.append(f"{of_paper.name} {again}")
            continue
        network = small_like(of_paper) if options.dry_run else of_paper
        if of_paper is LLAMA3_8B and not options.dry_run:
            network = cut_to_fit(network, again, _memory_of_device() * _SHARE_OF_DEVICE)
        entries = _entries(network, again, folder, options, (HAND, OURS))
        found = Found()
        for name, entry in entries.items():
            alone = _compete({name: entry}, options, folder, steps=steps, rounds=rounds)
            found.wall_us.update(alone.wall_us)
            found.failures.update(alone.failures)
        failed |= _say_rows(network, entries, found, options, about=_about(network, again))
    if left_out:
        say(f"\nLEFT OUT, no time was left: {', '.join(left_out)}.")
    return failed or int(bool(left_out))


def cut_to_fit(network: Network, again: str, limit: float) -> Network:
    """Return it with as many layers as a plan says fit into so many bytes, one at least: its memory is linear in depth."""
    from app.planning.memory import Case, peak

    whole = network.load().recipe.sections.model.layers

    def needed(layers: int) -> int:
        loaded = network.load(f"model.layers={layers}")
        case = Case(loaded, micro_batch=network.rows, precision="bf16", checkpoint_activations=again)
        return peak(case).total

    few = 4
    slope = (needed(2 * few) - needed(few)) / few
    layers = min(whole, max(1, few + math.floor((limit - needed(few)) / slope)))
    name = f"{network.name}, {layers} of its {whole} layers"
    return replace(network, name=name, overrides=(*network.overrides, f"model.layers={layers}"))


def write_tokens(folder: Path, *, vocabulary: int, count: int) -> Path:
    """Write so many made-up tokens as nanoGPT's files have them, once; of a large vocabulary the first 65,536."""
    place = folder / f"tokens-{vocabulary}"
    if not place.exists():
        place.mkdir()
        tokens = np.random.default_rng(0).integers(min(vocabulary, 1 << 16), size=count).astype(np.uint16)
        tokens.tofile(place / "train.bin")
        tokens[: count // 64].tofile(place / "val.bin")
    return place


def _entries(
    network: Network, again: str, folder: Path, options: argparse.Namespace, programs: Sequence[str]
) -> dict[str, Entry]:
    count = 1 << 17 if options.dry_run else 1 << 22
    task: dict[str, Any] = {
        "recipe": network.recipe,
        "overrides": network.words(),
        "batch": network.rows,
        "length": network.length,
        "checkpoint_activations": again,
        "folder": str(write_tokens(folder, vocabulary=network.vocabulary, count=count)),
    }
    # One device: with several the Trainer would take all.
    visible = (own_environment().get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    where = contestants.ON_CPU if options.dry_run else {"CUDA_VISIBLE_DEVICES": visible}
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **where}
    beside: dict[str, Mapping[str, Goal]] = {OURS: {HAND: Goal()}, _WHOLE: {HAND: Goal(least=0.98)}}
    if TRAINER in programs:
        beside[_WHOLE] = {**beside[_WHOLE], TRAINER: Goal(least=1.0)}
    entries = {}
    for name in programs:
        told = {**task, "program": OURS if name == _WHOLE else name}
        if name == _WHOLE:
            told["overrides"] = (*network.words(), "model.head=whole")
        entries[name] = Entry(task=told, variables=variables, beside=beside.get(name, {}))
    return entries


def _compete(entries: Mapping[str, Entry], options: argparse.Namespace, folder: Path, *, steps: int, rounds: int) -> Found:
    threads = 1 if options.dry_run else min(8, len(os.sched_getaffinity(0)))  # Samerun draws weights on the CPU
    logs = Path(tempfile.mkdtemp(dir=folder))
    return compete(entries, steps=steps, rounds=rounds, threads=threads, folder=logs, end_s=options.end_s, case=_CASE)


def _about(network: Network, again: str) -> str:
    batch = f"{network.rows} row{'s' if network.rows > 1 else ''} of {network.length}"
    return f"{network.name}, {batch}, {'layers computed again' if again == 'blocks' else 'all is kept'}"


def _rounds(found: Found) -> int:
    return max(map(len, found.wall_us.values()), default=0)


def _say_head(text: str, columns: Sequence[str] = ("MFU", "speed beside", "goal")) -> None:
    say(f"{text}\n")
    say(f"| | tokens/s | {' | '.join(columns)} |")
    say(f"|---|---|{'---|' * len(columns)}")


def _say_rows(
    network: Network, entries: Mapping[str, Entry], found: Found, options: argparse.Namespace, *, about: str = ""
) -> int:
    """Print their lines; return 0 if none failed."""
    flop_per_token, peak = _arithmetic(network, dry_run=options.dry_run)
    for name, entry in entries.items():
        shown = f"{about}: {name}" if about else name
        if name in found.failures:
            say(failed_line(shown, found.failures[name], columns=5))
        if wall_us := found.wall_us.get(name):
            rate = Spread.of([1e6 * network.tokens / each for each in wall_us])
            mfu = "unknown" if peak is None else f"{rate.median * flop_per_token / peak:.1%}"
            say(f"| {shown} | {rate.text(',.0f')} | {mfu} | {' | '.join(compared(name, entry, found))} |")
    return int(bool(found.failures))


def _arithmetic(network: Network, *, dry_run: bool) -> tuple[float, float | None]:
    """Return the floating-point operations of a token, and those a second that the device can do, if that is known."""
    import torch

    from app.metrics import flops
    from app.planning.model import blueprint
    from app.task import Form

    made = blueprint(network.load().recipe)
    example = made.task.example(made.facts, Form())
    of_batch = flops.of_training(made.model, lambda called: made.task.loss(called, example))
    device = torch.device("cpu" if dry_run else "cuda")
    return of_batch / example["labels"].numel(), flops.peak_per_s(device, mixed_precision="bf16")


def _memory_of_device() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
