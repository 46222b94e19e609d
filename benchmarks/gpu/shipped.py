"""The recipe imagenet_resnet50 as it is shipped, in a run as a user starts it: what it reaches, and what it waits for."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.contest import Goal, say
from launch.run_module import program

_GOAL = Goal(most=0.02)
_EVERY = 20
"""Steps of a line of metrics."""
_LINES = 6


def measure(options: argparse.Namespace, folder: Path) -> int:
    """On images that are made up as they are needed, by worker processes."""
    made_up = ("data.source=fakedata", f"data.fake_train_samples={1000 * options.batch}", "data.fake_test_samples=256")
    return run(options, folder / "run", made_up)


def run(options: argparse.Namespace, run_dir: Path, data: Sequence[str]) -> int:
    """Train for some lines of metrics, of which the first ones do not count, and print the medians of the others."""
    every, lines = (1, 3) if options.dry_run else (_EVERY, _LINES)
    words = ["launch", "--preset", "single_gpu", "--mixed-precision", "bf16", "--recipe", "imagenet_resnet50"]
    words += ["--run-dir", str(run_dir), "--trackers", "none", "--resume", "never", *data]
    words += [f"train.steps={every * lines}", f"log.every_steps={every}", "optim.warmup_epochs=null"]
    if options.dry_run:
        small = (f"train.global_batch_size={options.batch}", f"data.image_size={options.image_size}")
        words += [*small, f"data.resize_size={options.image_size}", f"model.name={options.model}"]
    subprocess.run([*program("launch.cli"), *words], check=True, stdout=sys.stderr)
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:]
    rate, mfu, waits = ([line[name] for line in found] for name in ("samples_per_s", "mfu", "data_wait_share"))
    mfu_text = "unknown" if None in mfu else f"{statistics.median(mfu):.1%}"
    wait = statistics.median(waits)
    shown_command = " ".join(words).replace(f"--run-dir {run_dir} ", "")
    say(f"| `samerun {shown_command}` | |\n|---|---|")
    say(f"| images/s | {statistics.median(rate):,.0f} ({min(rate):,.0f} to {max(rate):,.0f}, {len(found)} lines) |")
    say(f"| MFU | {mfu_text} |")
    say(f"| share of the time that it waits for data | {wait:.2%} (goal {_GOAL.verdict(wait)}) |\n")
    return 0
