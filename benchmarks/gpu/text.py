"""Language models in bf16 compared with a hand-written loop and transformers' Trainer, with and without recomputation.

The sizes are those of the shipped recipes, with a vocabulary of 50,304 for GPT-2's (as nanoGPT fills it up) and Llama 3's own;
the tokens are made up. Programs at GPT-2 124M take turns on the device. Of larger models each program has the device alone, and
Llama 3 8B has as many of its 32 layers as fit.

By default Samerun computes logits of so large a vocabulary by chunks, and once more in the backward pass, which saves most of
their memory: the hand-written loop and the Trainer hold them whole, and so does Samerun where the table says so. MFU does not
count recomputation; attention counts in full (`app/metrics/clock.py`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.environment.slurm_variables import own_environment
from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from benchmarks.__main__ import write_tokens
from benchmarks.contest import HAND, ON_CPU, SAMERUN, TEXT, Entry, Found, compete, say, say_rates

_HAND, _OURS, _WHOLE, _TRAINER = "hand-written", "samerun", "samerun, whole logits", "transformers' Trainer"
_HEAD = "| | tokens/s | MFU | speed beside | goal |\n|---|---|---|---|---|"
_LEAST_S = 30.0
"""With less than this nothing that is left is begun."""
_LAYER_BYTES, _OTHERS_BYTES = 4.0e9, 24e9
"""Of Llama 3 8B in a step: 16 bytes for each of the 218 million weights of a layer, and its activations if all are kept; the
embedding, the head and whole logits."""


@dataclass(frozen=True)
class Network:
    """A model and its batch."""

    name: str
    recipe: str
    vocabulary: int
    rows: int
    length: int
    overrides: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Return the recipe's overrides."""
        sizes = (f"model.vocab_size={self.vocabulary}", f"data.sequence_length={self.length}")
        return (*self.overrides, *sizes, f"train.global_batch_size={self.rows}")

    def load(self, *more: str) -> LoadedRecipe:
        """Return the recipe, without its text."""
        return recipe_file.load(self.recipe, (*self.words(), *more))


GPT2_124M = Network("GPT-2 124M", "gpt2_124m", 50304, rows=8, length=1024)
GPT3_350M = Network("GPT-3 350M", "gpt3_350m", 50304, rows=4, length=2048)
GPT3_1_3B = Network("GPT-3 1.3B", "gpt3_1_3b", 50304, rows=4, length=2048)
LLAMA3_8B = Network("Llama 3 8B", "llama3_8b", 128256, rows=1, length=4096, overrides=("data.document_masks=false",))
_LARGE = (
    (GPT3_1_3B, "blocks"), (LLAMA3_8B, "blocks"), (GPT3_1_3B, "none"), (LLAMA3_8B, "none"),
)  # fmt: skip
_WAYS = {"eager": "none", "compiled": "none", "checkpointed": "blocks"}
"""Ways to train, and what recomputes activations in each."""


def small_like(network: Network) -> Network:
    """Return a network for a dry run, with a head that goes by chunks."""
    sizes = ["model.hidden_size=64", "model.layers=2", "model.heads=4"]
    if "llama" in network.recipe:
        sizes += ["model.key_value_heads=2", "model.intermediate_size=128"]
    return replace(network, vocabulary=4096, rows=2, length=32, overrides=(*network.overrides, *sizes))


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Measure GPT-2 124M: all programs in turns, with activations kept and recomputed."""
    network = small_like(GPT2_124M) if options.dry_run else GPT2_124M
    failed = 0
    for again in ("none", "blocks"):
        entries = _entries(network, again, folder, options, (_HAND, _WHOLE, _OURS, _TRAINER))
        found = _compete(entries, options, folder, steps=options.steps, rounds=options.rounds)
        say(f"{_about(network, again)}; {found.rounds} rounds of {options.steps} steps.\n\n{_HEAD}")
        failed |= say_rates(entries, found, rows="labels", units=network.rows * network.length, on_cpu=options.dry_run)
        say("")
    return failed


def compiled(options: argparse.Namespace, folder: Path) -> int:
    """124M and 350M in eager mode, with compiled blocks, and with recomputed ones: the hand-written loop and ours, in turns."""
    failed, steps, backend = 0, max(2, options.steps // 2), "aot_eager" if options.dry_run else "inductor"
    for of_paper in (GPT2_124M, replace(GPT3_350M, rows=2)):  # all six programs of a model have to fit
        network, entries = small_like(of_paper) if options.dry_run else of_paper, {}
        for way, again in _WAYS.items():
            pair = _entries(network, again, folder, options, (_HAND, _WHOLE))
            if way == "compiled":
                pair[_HAND] = replace(pair[_HAND], task={**pair[_HAND].task, "compiled": backend})
                variables = {**pair[_WHOLE].variables, "ACCELERATE_DYNAMO_BACKEND": backend.upper()}
                pair[_WHOLE] = replace(pair[_WHOLE], variables=variables)
            for name, entry in pair.items():
                beside = {f"{name}, eager": ""} if way != "eager" else {}
                beside |= {f"{_HAND}, {way}": ">= 0.98"} if name == _WHOLE else {}
                entries[f"{name}, {way}"] = replace(entry, beside=beside)
        found = _compete(entries, options, folder, steps=steps, rounds=min(3, options.rounds))
        say(f"{network.name}, {network.rows} rows of {network.length}; {found.rounds} rounds of {steps} steps.\n\n{_HEAD}")
        failed |= say_rates(entries, found, rows="labels", units=network.rows * network.length, on_cpu=options.dry_run)
        say("")
    return failed


def large(options: argparse.Namespace, folder: Path) -> int:
    """1.3B, and as much of 8B as fits: the hand-written loop and ours, each alone on the device."""
    failed, left_out = 0, []
    rounds, steps = min(3, options.rounds), max(2, options.steps // 4)
    say(f"Each program alone; up to {rounds} windows of {steps} steps.\n\n{_HEAD}")
    for of_paper, again in _LARGE:
        if time.monotonic() + _LEAST_S > options.end_s:
            left_out.append(f"{of_paper.name} {again}")
            continue
        network = small_like(of_paper) if options.dry_run else of_paper
        if of_paper is LLAMA3_8B and not options.dry_run:
            import torch

            usable = 0.8 * torch.cuda.get_device_properties(0).total_memory
            layers = min(32, max(1, int((usable - _OTHERS_BYTES) / _LAYER_BYTES)))
            name, cut = f"{network.name}, {layers} of its 32 layers", (*network.overrides, f"model.layers={layers}")
            network = replace(network, name=name, overrides=cut)
        entries, found = _entries(network, again, folder, options, (_HAND, _OURS)), Found()
        for name, entry in entries.items():
            alone = _compete({name: entry}, options, folder, steps=steps, rounds=rounds)
            found.wall_us.update(alone.wall_us)
            found.failures.update(alone.failures)
        about, units = f"{_about(network, again)}: ", network.rows * network.length
        failed |= say_rates(entries, found, rows="labels", units=units, on_cpu=options.dry_run, about=about)
    if left_out:
        say(f"\nLEFT OUT, no time was left: {', '.join(left_out)}.")
    return failed or int(bool(left_out))


def tokens(network: Network, folder: Path, *, dry_run: bool) -> Path:
    """Return the folder with made-up tokens for a network, written once."""
    place = folder / f"tokens-{network.vocabulary}"
    if not place.exists():
        write_tokens(place, 1 << 17 if dry_run else 1 << 22, vocabulary=network.vocabulary)
    return place


def _entries(network: Network, again: str, folder: Path, options: argparse.Namespace, names: Sequence[str]) -> dict[str, Entry]:
    # One device: with several the Trainer would take all.
    visible = (own_environment().get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **(ON_CPU if options.dry_run else {"CUDA_VISIBLE_DEVICES": visible})}
    beside: dict[str, Mapping[str, str]] = {_OURS: {_HAND: ""}, _WHOLE: {_HAND: ">= 0.98", _TRAINER: ">= 1.0"}}
    programs = {_HAND: HAND, _OURS: SAMERUN, _WHOLE: SAMERUN, _TRAINER: "transformers"}
    entries, place = {}, tokens(network, folder, dry_run=options.dry_run)
    for name in names:
        words = (*TEXT, *network.words(), f"train.checkpoint_activations={again}", f"data.path={place}")
        whole = ("model.head=whole",) if name == _WHOLE else ()
        task = {"program": programs[name], "recipe": network.recipe, "overrides": (*words, *whole)}
        entries[name] = Entry(task=task, variables=variables, beside=beside.get(name, {}))
    return entries


def _compete(entries: Mapping[str, Entry], options: argparse.Namespace, folder: Path, *, steps: int, rounds: int) -> Found:
    threads = 1 if options.dry_run else min(8, len(os.sched_getaffinity(0)))  # Samerun draws weights on the CPU
    logs = Path(tempfile.mkdtemp(dir=folder))
    return compete(entries, steps=steps, rounds=rounds, threads=threads, folder=logs, end_s=options.end_s)


def _about(network: Network, again: str) -> str:
    batch = f"{network.rows} row{'s' if network.rows > 1 else ''} of {network.length}"
    return f"{network.name}, {batch}, {'activations recomputed' if again == 'blocks' else 'activations kept'}"
