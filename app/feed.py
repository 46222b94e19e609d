"""The batches of each step, ready for the model, each with its weight in the step's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import torch

from app import building
from app.building import Parts
from app.data.draws import Draws
from app.data.loader import batches_of
from app.data.order import TrainBatches, derive_key
from app.data.samples import Batch
from app.errors import TrainingError
from app.metrics.clock import Phase
from app.recipe.schema import Recipe
from app.task import overrides, own_part


class Feed:
    """Feeds this rank with its passes over a run's global batches, from one step on."""

    def __init__(
        self,
        parts: Parts,
        first_step: int,
        *,
        see: Callable[[int, int, Batch], None],
        lap: Callable[[Phase], None],
        say: Callable[[str], None],
    ) -> None:
        """`see` gets each batch, with its step and its number in it; `lap` ends a phase of a step, and `say` shows a line."""
        self._runtime, self._recipe, self._task, self._form = parts.runtime, parts.loaded.recipe, parts.task, parts.form
        self._samples, self._dropout = parts.data.train, parts.dropout
        self.batches = building.training_batches(parts, first_step)
        """This rank's shares of the micro-batches; what fetches them is released with the model."""
        self._see, self._lap, self._say = see, lap, say
        self._draws_by_rank: bool | None = None
        """True if passes draw from torch's generators; None: not known yet."""
        self._fetched = batches_of(self.batches)
        self.total: float | torch.Tensor = float(parts.runtime.plan.global_batch_size)
        """Sum of the `Loss.count` of all passes of the last step, on all ranks; a tensor is a scalar."""

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        """End what fetches batches ahead of time."""
        with closing(self._fetched):
            self._dropout.end()

    def passes(self, step: int) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the batches of a step (from 0) with their weights: those of all ranks and passes have the mean 1 / passes."""
        batches = map(self._next, itertools.repeat(step), range(self._runtime.plan.accumulation))
        weighed = self._weighed(step, batches)
        return weighed if self._draws_by_rank is False and not self._dropout.layers else self._begun(step, weighed)

    def samples_of(self, step: int) -> list[int]:
        """Return the indices of the samples of a step (from 0)."""
        return samples_of(self._recipe, len(self._samples), step).tolist()  # type: ignore[no-any-return]

    def _next(self, step: int, number: int) -> Batch:
        self._runtime.alive(step=step)
        self._lap("other")
        batch = next(self._fetched)
        self._lap("data_wait")
        draw = Draws(self._recipe.seed, batch["samples"], batch["numbers"])
        ready = self._task.preprocess(batch, draw, form=self._form)
        self._see(step, number, ready)
        return ready

    def _weighed(self, step: int, passes: Iterator[Batch]) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the passes with count * ranks / total: averaged over ranks, they add up to the mean of the global batch."""
        runtime = self._runtime
        ranks = runtime.plan.data_ranks
        if own_part(self._samples, "count") is not None:  # known beforehand, on the host
            size = len(self._samples)
            self.total = float(np.sum(self._samples.count(samples_of(self._recipe, size, step))))
            total = max(self.total, 1.0)
            return ((batch, float(np.sum(self._samples.count(batch["numbers"] % size))) * ranks / total) for batch in passes)
        if overrides(self._task, "count"):  # known when all batches are in memory
            batches = list(passes)
            counts = [torch.as_tensor(self._task.count(it), dtype=torch.float64, device=runtime.device) for it in batches]
            self.total = in_all = runtime.reduce(torch.stack(counts).sum())
            return zip(batches, [count * ranks / in_all.clamp(min=1) for count in counts], strict=True)
        return zip(passes, itertools.repeat(1 / runtime.plan.accumulation), strict=False)

    def _begun(
        self, step: int, passes: Iterator[tuple[Batch, float | torch.Tensor]]
    ) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Give dropout the samples of each pass, and seed torch's generators for all other random numbers.

        They are seeded for each pass, so that a resumed run draws the same numbers, and for each data-parallel rank, as other
        samples must not get the same. The first pass shows whether any are drawn: a draw changes the generator's state. Raises
        TrainingError if they are, and a step is several passes, or several processes'.
        """
        runtime = self._runtime
        for number, batch_and_weight in enumerate(passes):
            self._dropout.begin(batch_and_weight[0]["samples"])
            if self._draws_by_rank is not False:
                torch.manual_seed(derive_key(self._recipe.seed, "dropout", step, number, runtime.launched.data_rank))
            if self._draws_by_rank is not None:
                yield batch_and_weight
                continue
            state = _state_of_generator(runtime.device)
            yield batch_and_weight
            self._draws_by_rank = not torch.equal(state, _state_of_generator(runtime.device))
            with runtime.together():
                if self._draws_by_rank:
                    parts = runtime.launched.tensor_parallel
                    sentence = self._dropout.said_of_others(runtime.plan, parts=parts)
                    if runtime.plan.passes * parts > 1:
                        raise TrainingError(sentence)
                    self._say(f"note: {sentence}")


def _state_of_generator(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that operations on the device draw from."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


def samples_of(recipe: Recipe, size: int, step: int) -> np.ndarray:
    """Return the indices, int64 [global batch], of the samples of a step (from 0), of `size` training samples."""
    batch, seed = recipe.train.global_batch_size, recipe.seed
    batches = TrainBatches(
        size=size, seed=seed, global_batch_size=batch, micro_batches_per_step=1, first_step=step, last_step=step + 1
    )
    indices: np.ndarray = next(iter(batches)) % size
    return indices
