"""`samerun data bench`: pictures a second from a recipe's data path, what they cost, and how many cores feed a device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.data import loader
from app.data.draws import Draws, HostDraws
from app.data.order import TrainBatches
from app.environment import host
from app.errors import DataError, RecipeError
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.augment import Preparation
from app.tasks.image_classification.data.images import Images
from app.tasks.image_classification.data.open import open_data

BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a training picture costs: microseconds of one core, files in the system's page cache."""

    read_us: float
    """Getting its bytes, where files are stored."""
    decode_us: float
    frame_us: float
    """Cropping and resizing; for arrays the look-up."""
    augment_us: float
    """Augmenting and normalizing on the CPU; on a GPU that is not the cores' work."""
    workers: int
    """Processes that decoded in the measurement with workers; 0: arrays need none."""
    with_workers_per_s: float
    """Pictures a second as training is fed them, by the clock, nothing else being done."""

    @property
    def fetch_us(self) -> float:
        """All that the cores do for a picture when a GPU trains."""
        return self.read_us + self.decode_us + self.frame_us

    def cores_for(self, images_per_s: float) -> int:
        """Return how many such cores feed a device that takes so many pictures a second."""
        return max(1, math.ceil(images_per_s * self.fetch_us / 1e6))


def measure(recipe: Recipe, *, seconds: float) -> Costs:
    """Return the costs of a recipe's training pictures, each part measured for about `seconds` with one thread."""
    train = open_data(recipe.sections).train
    if isinstance(train, DataError):
        raise train
    source = train
    if len(source) < BATCH:
        raise RecipeError(f"the training split has {len(source)} samples, and measuring needs at least {BATCH}")

    def fetch(indices: np.ndarray) -> dict[str, torch.Tensor]:
        return source.fetch(indices, HostDraws(recipe.seed, indices))  # as the first epoch of a training

    own = recipe.sections
    preparation = Preparation(own.data, own.augment, num_classes=len(source.classes), channels=source.channels)
    order = (numbers % len(source) for numbers in _order(recipe, source))
    with _one_thread():
        first = next(order)
        fetch(first)
        start_s = time.perf_counter()
        fetch(first)
        count = max(1, min(1000, int(seconds / max(1e-6, time.perf_counter() - start_s))))
        batches = [next(order) for _ in range(count)]
        read_us = decoded_us = 0.0
        if source.workers:
            decoded_us = _cpu_us(batches, lambda indices: deque(source.images(indices.tolist()), maxlen=0))
            if source.file(0) is not None:
                read_us = _cpu_us(batches, lambda indices: [source.file(index) for index in indices.tolist()])
        fetched_us = _cpu_us(batches, fetch)
        decoded_us = min(decoded_us, fetched_us)
        fed = {**fetch(first), "samples": torch.from_numpy(first)}
        augment_us = _cpu_us(batches, lambda _: preparation.train(fed, Draws(recipe.seed, fed["samples"])))
    workers, with_workers_per_s = _with_workers(recipe, source, seconds)
    return Costs(
        read_us=read_us,
        decode_us=max(0.0, decoded_us - read_us),
        frame_us=max(0.0, fetched_us - decoded_us),
        augment_us=augment_us,
        workers=workers,
        with_workers_per_s=with_workers_per_s,
    )


def as_text(costs: Costs, images_per_s: float | None) -> str:
    """Return the table for people."""
    own_cores = host.usable(1)
    parts = {"reading": costs.read_us, "decoding": costs.decode_us, "framing or look-up": costs.frame_us}
    lines = ["one core, by CPU time         us a picture   share"]
    lines += [f"  {name:26} {us:12,.1f} {us / costs.fetch_us:8.0%}" for name, us in parts.items()]
    lines += [f"  {'total of a worker':26} {costs.fetch_us:12,.1f}          {1e6 / costs.fetch_us:,.0f} pictures/s a core"]
    lines += [f"  {'augmenting, if on the CPU':26} {costs.augment_us:12,.1f}"]
    how = f"{costs.workers} worker process{'es' if costs.workers != 1 else ''}" if costs.workers else "no workers"
    lines += [f"as in training, {how} on {own_cores} cores: {costs.with_workers_per_s:,.0f} pictures/s"]
    if images_per_s is not None:
        needed = costs.cores_for(images_per_s)
        lines += [
            (f"a device that trains on {images_per_s:,.0f} pictures/s needs {needed} such core{'s' if needed > 1 else ''}")
        ]
    return "\n".join(lines) + "\n"


def _order(recipe: Recipe, source: Images) -> TrainBatches:
    return TrainBatches(
        size=len(source), seed=recipe.seed, global_batch_size=BATCH, micro_batches_per_step=1, first_step=0, last_step=10**12
    )


def _cpu_us(batches: list[np.ndarray], work: Callable[[np.ndarray], Any]) -> float:
    """Return microseconds of CPU time a sample of working on all batches, after one that warms up."""
    work(batches[0])
    start_s = time.process_time()
    for indices in batches:
        work(indices)
    return (time.process_time() - start_s) / (len(batches) * BATCH) * 1e6


def _with_workers(recipe: Recipe, source: Images, seconds: float) -> tuple[int, float]:
    """Return the number of workers that training on this machine would start, and pictures a second as it is fed."""
    if not source.workers:  # training looks batches up itself
        return 0, _per_second(map(loader.Fetching(source, seed=recipe.seed).__getitems__, _order(recipe, source)), seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = loader.workers_of(None, local_world_size=1, device=device)
    fed = loader.build_loader(source, _order(recipe, source), seed=recipe.seed, workers=workers)
    batches = iter(fed)
    for _ in range(2 * fed.num_workers):  # what the workers had ready when the measurement began
        next(batches)
    return fed.num_workers, _per_second(batches, seconds)


def _per_second(batches: Iterator[loader.Batch | loader.Failure], seconds: float) -> float:
    fed = loader.batches_of(batches)
    next(fed)
    start_s, taken = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - start_s) < seconds or taken == 0:
        taken += len(next(fed)["samples"])
    return taken / elapsed_s


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
