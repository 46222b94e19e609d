"""Feeding: sample numbers in, whole batches out, on this process's device.

A sample number is `epoch * size + index`; it is all that a worker needs to make the sample, and all that the augmentation
needs to be the same anywhere. -1 is padding. A batch is a dict of tensors: `images` uint8 [B, C, H, W], `labels` int64 [B]
and `samples` int64 [B], the sample numbers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from app import cores
from app.data.source import Source
from app.errors import DataError

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """What a worker sends instead of a batch: raised there, the error would reach the user wrapped in two tracebacks."""

    text: str


class Samples(Dataset):
    """A source as torch's DataLoader sees it: indexed by sample numbers, a whole batch at a time."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, numbers: Any) -> Batch | Failure:
        """Return the batch of the given sample numbers (list or array of int64 [B])."""
        samples = np.asarray(numbers, dtype=np.int64)
        indices = np.where(samples < 0, 0, samples % len(self.source))
        try:
            images, labels = self.source.fetch(indices, samples)
        except DataError as error:
            return Failure(str(error))
        return {"images": images, "labels": labels, "samples": torch.from_numpy(samples)}


def build(source: Source, batches: Any, *, local_world_size: int, device: torch.device) -> DataLoader:
    """Return a loader over `batches`, a batch sampler of global micro-batches, for `Accelerator.prepare` to divide.

    Arrays are looked up in this process: handing a batch over from a worker costs more than the look-up.
    """
    workers = num_workers(cores.of_this_process(local_world_size), device) if source.decodes else 0
    return DataLoader(
        Samples(source),
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_run,
    )


def num_workers(own_cores: int, device: torch.device) -> int:
    """Return how many decoding processes one training process may start that has this many cores.

    Where the CPU trains, one is kept for that. More than 16 never paid off in published measurements.
    """
    return max(0, min(16, own_cores - (1 if device.type == "cpu" else 0)))


def batches_of(loader: Iterable[Batch | Failure]) -> Iterator[Batch]:
    """Yield the loader's batches. Raises DataError, with the worker's sentence, for a batch that could not be made."""
    for batch in loader:
        if isinstance(batch, Failure):
            raise DataError(batch.text)
        yield batch


def _leave_signals_to_the_run(_worker: int) -> None:
    """Schedulers and launchers signal all processes of a run at once, and it still needs its batches until it has stopped."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _as_is(batch: Any) -> Any:
    return batch
