"""One process of `benchmarks.saving`: measures a task on a model of the wanted size and writes what it found.

times             seconds of a save, by us and by Accelerate, in turns
save-samerun ...  memory that saving, or loading, takes at its peak beyond the state itself; once, in a fresh process
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.checkpoints import checkpoint
from app.checkpoints.checkpoint import Checkpoints
from app.checkpoints.shards import Shards
from app.guard.patience import Patience
from app.metrics.gauges import Gauges
from app.metrics.metrics import Metrics
from app.optim import from_recipe
from app.optim.spikes import SpikeGuard
from app.place.launched import read
from app.ranks.runtime import Runtime
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe, TrainRecipe
from app.record.claim import Claim, claim
from app.trackers.trackers import Trackers
from benchmarks.memory import status_bytes

WIDTH = 2048
"""Of the square layers, in units: each is 4.2 million weights, 50 MB with the two moments of AdamW."""
LAYER_STATE_BYTES = (WIDTH + 1) * WIDTH * 12
_SAMPLE_S = 0.002


@dataclass(frozen=True)
class Case:
    """A model that has taken a step, and both ways to save it."""

    runtime: Runtime
    model: nn.Module
    optimizer: Any
    checkpoints: Checkpoints
    folder: Path

    @property
    def theirs(self) -> Path:
        """The folder for Accelerate's checkpoint."""
        return self.folder / "accelerate"

    def step(self) -> None:
        """Take a step, after which AdamW has its moments."""
        self.model(torch.ones(1, WIDTH, device=self.runtime.device)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _build(layers: int, folder: Path) -> Case:
    launched = read(os.environ)
    world_size = launched.world_size
    runtime = Runtime(launched, BatchPlan(global_batch_size=world_size, data_ranks=world_size, accumulation=1))
    recipe = Recipe(train=TrainRecipe(global_batch_size=world_size))
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    model, optimizer = runtime.prepare(plain, from_recipe.build(recipe.optim, plain))
    facts: dict[str, Any] = {"data": {}, "model": {}}
    shards = Shards(runtime.accelerator, model, optimizer)
    with runtime.together():
        made = claim(folder) if runtime.is_main else None
    place = runtime.from_main(made.place if made else None)
    ours = made or Claim(folder, place)
    gauges = Gauges(runtime, model, flops_per_sample=0.0, peak_flops_per_s=None)
    metrics = Metrics(runtime, ours, gauges, Trackers(), global_batch_size=world_size, log=recipe.log)
    checkpoints = Checkpoints(
        runtime,
        ours,
        recipe,
        shards=shards,
        facts=facts,
        frozen=None,
        monitor=("accuracy", "max"),
        metrics=metrics,
        spikes=SpikeGuard(None),
        patience=Patience(("accuracy", "max"), None),
        on_disk=lambda _: None,
    )
    return Case(runtime, model, optimizer, checkpoints, folder)


def _times(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds that the loop is held, and until the disk has it, of each way in each round: the slowest rank's."""
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        ways = {"samerun": _save_ours, "accelerate": _save_theirs}
        for way in sorted(ways, reverse=number % 2 == 1):
            case.step()
            shutil.rmtree(case.theirs, ignore_errors=True)
            os.sync()  # what was written before is not to be waited for by what is measured
            case.runtime.accelerator.wait_for_everyone()
            seconds = ways[way](case, number + 1)
            slowest = [max(of_ranks) for of_ranks in zip(*case.runtime.gather(seconds), strict=True)]
            for what, value in zip(("held_s", "on_disk_s"), slowest, strict=True):
                found.setdefault(f"{way} {what}", []).append(value)
    return found


def _save_ours(case: Case, step: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    case.checkpoints.save(step)
    held_s = time.perf_counter() - start_s
    case.checkpoints.finish()
    return held_s, time.perf_counter() - start_s


def _save_theirs(case: Case, _step: int) -> tuple[float, float]:
    start_s = time.perf_counter()
    case.runtime.accelerator.save_state(str(case.theirs))
    case.runtime.accelerator.wait_for_everyone()
    held_s = time.perf_counter() - start_s
    for file in case.theirs.iterdir() if case.runtime.is_main else ():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    return held_s, time.perf_counter() - start_s


def _memory(case: Case, task: str, layers: int) -> dict[str, list[float]]:
    """Bytes beyond the state at the peak, of the rank that has most: resident ones, and those that are no file's."""
    tasks: dict[str, Callable[[], Any]] = {
        "save-samerun": lambda: _save_ours(case, 1),
        "save-accelerate": lambda: _save_theirs(case, 1),
        "load-samerun": lambda: _load_ours(case),
        "load-accelerate": lambda: case.runtime.accelerator.load_state(str(case.theirs)),
    }
    is_load = task.startswith("load")
    if not is_load:
        case.step()
    before, anonymous_before = status_bytes("VmRSS"), status_bytes("RssAnon")
    # A fresh optimizer gets its moments by loading: they are state.
    state_bytes = layers * LAYER_STATE_BYTES * 2 // 3 if is_load else 0
    with _anonymous_peak() as anonymous:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): begins VmHWM anew
        tasks[task]()
        peak = status_bytes("VmHWM")
    found = (peak - before - state_bytes, max(anonymous) - anonymous_before - state_bytes)
    resident, own = (max(of_ranks) for of_ranks in zip(*case.runtime.gather(found), strict=True))
    return {f"{task} extra_bytes": [resident], f"{task} extra_anonymous_bytes": [own]}


def _load_ours(case: Case) -> None:
    folder = checkpoint.find(case.runtime, case.folder)
    assert folder is not None
    case.checkpoints.restore(folder)


@contextmanager
def _anonymous_peak() -> Iterator[list[int]]:
    """Sample the bytes of this process that are no file's, while the block runs."""
    sampled, done = [status_bytes("RssAnon")], threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            sampled.append(status_bytes("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sampled
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Do one task and write the figures, by name, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    case = _build(options.layers, options.folder)
    found = _times(case, options.rounds) if options.task == "times" else _memory(case, options.task, options.layers)
    if case.runtime.is_main:
        options.result.write_text(json.dumps(found))
    case.runtime.close(case.model, case.optimizer)


if __name__ == "__main__":
    main()
