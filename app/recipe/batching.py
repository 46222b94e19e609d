"""Dividing the global batch among processes: `global_batch_size = micro_batch x accumulation x world_size`.

The global batch belongs to the recipe and never changes; the other three are derived here, so that every topology sees
the same samples in the same step. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import RecipeError
from app.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How one global batch is dealt out."""

    global_batch_size: int
    """Samples in one optimizer step, over all processes."""
    world_size: int
    """Processes."""
    accumulation: int
    """Forward passes of each process in one optimizer step."""

    @property
    def micro_batch(self) -> int:
        """Samples in one forward pass on one process."""
        return self.global_batch_size // (self.world_size * self.accumulation)

    def __str__(self) -> str:
        """`global batch 64 = micro-batch 16 x accumulation 2 x 2 processes`."""
        processes = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        batches = f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"
        return f"global batch {self.global_batch_size} = {batches} x {processes}"

    @property
    def passes(self) -> int:
        """Forward passes of a step, on all processes together."""
        return self.world_size * self.accumulation

    @classmethod
    def of(cls, recipe: Recipe, world_size: int) -> BatchPlan:
        """Return how a recipe's global batch is dealt out to so many processes. Raises RecipeError as `fit` does."""
        return cls.fit(
            global_batch_size=recipe.train.global_batch_size,
            world_size=world_size,
            max_micro_batch=recipe.train.max_micro_batch,
            neighbours=recipe.sections.neighbours,
            why_neighbours=recipe.sections.why_neighbours,
        )

    @classmethod
    def fit(
        cls,
        *,
        global_batch_size: int,
        world_size: int,
        max_micro_batch: int | None = None,
        neighbours: int = 1,
        why_neighbours: str = "",
    ) -> BatchPlan:
        """Return the plan with the fewest forward passes whose micro-batch is at most `max_micro_batch` samples.

        Every micro-batch holds whole groups of so many `neighbours`, for the reason given (mixup mixes pairs).
        Raises RecipeError, which names the world sizes that would do, when no plan exists.
        """
        accumulation = _fewest_passes(global_batch_size, world_size, max_micro_batch, neighbours)
        if accumulation is None:
            raise RecipeError(_refusal(global_batch_size, world_size, max_micro_batch, neighbours, why_neighbours))
        return cls(global_batch_size=global_batch_size, world_size=world_size, accumulation=accumulation)


def _fewest_passes(global_batch_size: int, world_size: int, max_micro_batch: int | None, neighbours: int) -> int | None:
    share, rest = divmod(global_batch_size, world_size)
    if rest or share == 0:
        return None
    for accumulation in range(1, share + 1):
        micro_batch, rest = divmod(share, accumulation)
        fits = max_micro_batch is None or micro_batch <= max_micro_batch
        if not rest and fits and micro_batch % neighbours == 0:
            return accumulation
    return None


def _refusal(global_batch_size: int, world_size: int, max_micro_batch: int | None, neighbours: int, why_neighbours: str) -> str:
    def works(size: int) -> bool:
        return _fewest_passes(global_batch_size, size, max_micro_batch, neighbours) is not None

    if max_micro_batch is not None and max_micro_batch < neighbours:
        return (
            f"train.max_micro_batch is {max_micro_batch}, and {why_neighbours}: set train.max_micro_batch to {neighbours} or "
            "more, or switch that off"
        )
    legal = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0 and works(size)]
    below = [size for size in legal if size < world_size][-4:]
    above = [size for size in legal if size > world_size][:4]
    conditions = "equal micro-batches"
    if neighbours > 1:
        conditions = f"equal micro-batches of a multiple of {neighbours} ({why_neighbours})"
    if max_micro_batch is not None:
        conditions += f" of at most {max_micro_batch} samples (train.max_micro_batch)"
    choices = ", ".join(map(str, [*below, *above]))
    remedy = f"use {choices} processes, or" if choices else "no number of processes can:"
    return (
        f"train.global_batch_size is {global_batch_size}, which {world_size} processes cannot divide into {conditions}: "
        f"{remedy} change train.global_batch_size (a multiple of {world_size * neighbours} always works)"
    )
