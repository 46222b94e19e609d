"""The batches of each step, ready for the model, each with its weight in the step's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch

from app.data.draws import Draws
from app.data.hash64 import derive_key
from app.data.loader import Failure, batches_of
from app.data.order import TrainBatches
from app.data.samples import Batch
from app.metrics.clock import Phase
from app.ranks.runtime import Runtime
from app.recipe.schema import Recipe
from app.task import Form, Task


class Feed:
    """Feeds this rank with its passes over a run's global batches, from one step on."""

    def __init__(  # noqa: PLR0913  (keyword-only after the parts)
        self,
        runtime: Runtime,
        recipe: Recipe,
        task: Task,
        samples: Any,
        batches: Iterable[Batch | Failure],
        *,
        form: Form,
        draws_in_passes: bool,
        see: Callable[[int, int, Batch], None],
        lap: Callable[[Phase], None],
    ) -> None:
        """`batches` are this rank's shares of the micro-batches of all steps, on its device, of the training `samples`.

        `draws_in_passes`: whether forward passes draw from torch's generators, as dropout does. `see` is shown each batch, with
        its step and its number in it; `lap` ends a phase of a step.
        """
        self._runtime, self._recipe, self._task, self._samples = runtime, recipe, task, samples
        self.batches = batches
        """As they were given: what fetches them is released with the model."""
        self._form, self._draws_in_passes, self._see, self._lap = form, draws_in_passes, see, lap
        self._fetched = batches_of(batches)
        self.total: float | torch.Tensor = float(runtime.plan.global_batch_size)
        """What the `Loss.count` of all passes of the last step, on all ranks, is to add up to; a tensor is a scalar."""

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        """End what fetches batches ahead of time."""
        with closing(self._fetched):
            pass

    def of_step(self, step: int) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the batches of a step (from 0) with their weights: those of all ranks and passes have the mean 1 / passes."""
        passes = map(self._next, itertools.repeat(step), range(self._runtime.plan.accumulation))
        weighed = self._weighed(step, passes)
        return self._seeded(step, weighed) if self._draws_in_passes else weighed

    def samples_of(self, step: int) -> list[int]:
        """Return the indices of the samples of a step (from 0)."""
        return samples_of(self._recipe, len(self._samples), step).tolist()  # type: ignore[no-any-return]

    def _next(self, step: int, number: int) -> Batch:
        self._runtime.alive(step=step)
        self._lap("other")
        batch = next(self._fetched)
        self._lap("data_wait")
        draw = Draws(self._recipe.seed, batch["samples"], batch["numbers"])
        ready = self._task.ready(batch, draw, self._form)
        self._see(step, number, ready)
        return ready

    def _weighed(self, step: int, passes: Iterator[Batch]) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the passes with count * ranks / total: averaged over ranks, they add up to the mean of the global batch."""
        ranks = self._runtime.plan.world_size
        if hasattr(self._samples, "count"):  # known beforehand, on the host
            size = len(self._samples)
            self.total = float(self._samples.count(samples_of(self._recipe, size, step)).sum())
            total = max(self.total, 1.0)
            return ((batch, float(self._samples.count(batch["numbers"] % size).sum()) * ranks / total) for batch in passes)
        if hasattr(self._task, "count"):  # known when all batches are there
            batches = list(passes)
            counts = [self._task.count(batch).double() for batch in batches]
            self.total = total = self._runtime.accelerator.reduce(torch.stack(counts).sum(), "sum")
            return zip(batches, [count * ranks / total.clamp(min=1) for count in counts], strict=True)
        return zip(passes, itertools.repeat(1 / self._runtime.plan.accumulation), strict=False)

    def _seeded(
        self, step: int, passes: Iterator[tuple[Batch, float | torch.Tensor]]
    ) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Seed torch's generators for each forward pass, so that a resumed run draws what it would have drawn.

        Ranks draw differently, for dropout on different samples must not repeat itself.
        """
        for number, batch_and_weight in enumerate(passes):
            torch.manual_seed(derive_key(self._recipe.seed, "dropout", step, number, self._runtime.launched.rank))
            yield batch_and_weight


def samples_of(recipe: Recipe, size: int, step: int) -> np.ndarray:
    """Return the indices, int64 [global batch], of the samples of a step (from 0), of `size` training samples."""
    batches = TrainBatches(
        size=size,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=1,
        first_step=step,
        last_step=step + 1,
    )
    indices: np.ndarray = next(iter(batches)) % size
    return indices
