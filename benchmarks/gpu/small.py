"""What the loop costs a step of models so small that the host is what a step waits for."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import contestants
from benchmarks.figures import LINEAR, Spread
from benchmarks.gpu.contest import HAND, OURS, Entry, Goal, compete, failed_line, say

_GOAL = Goal(most=100)
_BATCH = 128
_MODELS = (LINEAR, "convnet")


def measure(options: argparse.Namespace, folder: Path) -> int:
    """One matrix, and the small ConvNet, on gray images of 28 pixels, in bf16 with the fused AdamW."""
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", **(contestants.ON_CPU if options.dry_run else {})}
    entries = {}
    for model in _MODELS:
        task = {
            "recipe": "fashion_mnist",
            "overrides": [f"train.global_batch_size={_BATCH}"],
            "model": model,
            "folder": str(folder),
            "shape": (1, 28, 28, 10),
            "synthetic_samples": 64 * _BATCH,
        }
        hand = f"{model}, hand-written"
        entries[hand] = Entry(task={**task, "program": HAND}, variables=variables)
        ours = Entry(task={**task, "program": OURS}, variables=variables, beside={hand: _GOAL})
        entries[f"{model}, samerun"] = ours
    steps, rounds = options.small_steps, options.rounds + 2
    found = compete(entries, steps=steps, rounds=rounds, threads=options.threads, folder=folder, end_s=options.end_s)
    say(f"Batches of {_BATCH}; up to {rounds} rounds of {steps} steps.\n")
    say("| | us a step | over the hand-written loop, us | goal |\n|---|---|---|---|")
    for name, entry in entries.items():
        if name in found.failures:
            say(failed_line(name, found.failures[name], columns=4))
            continue
        over = [Spread.of([own - other for own, other in found.pairs(name, hand)]) for hand in entry.beside]
        cells = (over[0].text("+,.0f"), _GOAL.verdict(over[0].median)) if over else ("", "")
        say(f"| {name} | {Spread.of(found.wall_us[name]).text(',.0f')} | {' | '.join(cells)} |")
    return int(bool(found.failures))
