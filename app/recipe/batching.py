"""Dividing the global batch among ranks: `global_batch_size = micro_batch x accumulation x data_ranks`.

The global batch belongs to the recipe and never changes; the other three are derived here, so that every topology sees
the same samples in the same step. A data-parallel rank is a process; under tensor parallelism it is a group of them, which
compute the same samples together. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import RecipeError
from app.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How one global batch is dealt out."""

    global_batch_size: int
    """Samples in one optimizer step, over all ranks."""
    data_ranks: int
    """Data-parallel ranks, which divide the batch."""
    accumulation: int
    """Forward passes of each rank in one optimizer step."""
    tensor_parallel: int = 1
    """Processes of each rank."""

    @property
    def micro_batch(self) -> int:
        """Samples in one forward pass on one rank."""
        return self.global_batch_size // (self.data_ranks * self.accumulation)

    def __str__(self) -> str:
        """`global batch 64 = micro-batch 16 x accumulation 2 x 2 processes`."""
        ranks = _counted(self.data_ranks, "process", "es")
        if self.tensor_parallel > 1:
            ranks = f"{_counted(self.data_ranks, 'data-parallel rank')} of {self.tensor_parallel} processes"
        batches = f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"
        return f"global batch {self.global_batch_size} = {batches} x {ranks}"

    @property
    def passes(self) -> int:
        """Forward passes of a step, on all ranks together."""
        return self.data_ranks * self.accumulation

    @classmethod
    def of(cls, recipe: Recipe, data_ranks: int, *, tensor_parallel: int = 1) -> BatchPlan:
        """Return how a recipe's global batch is dealt out to so many ranks. Raises RecipeError as `fit` does."""
        return cls.fit(
            global_batch_size=recipe.train.global_batch_size,
            data_ranks=data_ranks,
            tensor_parallel=tensor_parallel,
            max_micro_batch=recipe.train.max_micro_batch,
            group_size=recipe.sections.group_size,
            why_grouped=recipe.sections.why_grouped,
        )

    @classmethod
    def fit(
        cls,
        *,
        global_batch_size: int,
        data_ranks: int,
        tensor_parallel: int = 1,
        max_micro_batch: int | None = None,
        group_size: int = 1,
        why_grouped: str = "",
    ) -> BatchPlan:
        """Return the plan with the fewest forward passes whose micro-batch is at most `max_micro_batch` samples.

        Every micro-batch holds whole groups of `group_size` samples, for the reason given (mixup mixes pairs).
        Raises RecipeError, which names the numbers of processes that would do, when no plan exists.
        """
        accumulation = _fewest_passes(global_batch_size, data_ranks, max_micro_batch, group_size)
        plan = cls(
            global_batch_size=global_batch_size,
            data_ranks=data_ranks,
            accumulation=accumulation or 1,
            tensor_parallel=tensor_parallel,
        )
        if accumulation is None:
            raise RecipeError(_refusal(plan, max_micro_batch, group_size, why_grouped))
        return plan


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count > 1 else ''}"


def _fewest_passes(global_batch_size: int, data_ranks: int, max_micro_batch: int | None, group_size: int) -> int | None:
    share, rest = divmod(global_batch_size, data_ranks)
    if rest or share == 0:
        return None
    for accumulation in range(1, share + 1):
        micro_batch, rest = divmod(share, accumulation)
        fits = max_micro_batch is None or micro_batch <= max_micro_batch
        if not rest and fits and micro_batch % group_size == 0:
            return accumulation
    return None


def _refusal(plan: BatchPlan, max_micro_batch: int | None, group_size: int, why_grouped: str) -> str:
    """Why a plan, of whatever accumulation, cannot be."""
    global_batch_size, ranks, each = plan.global_batch_size, plan.data_ranks, plan.tensor_parallel

    def works(size: int) -> bool:
        return _fewest_passes(global_batch_size, size, max_micro_batch, group_size) is not None

    if max_micro_batch is not None and max_micro_batch < group_size:
        return (
            f"train.max_micro_batch is {max_micro_batch}, and {why_grouped}: set train.max_micro_batch to "
            f"{group_size} or more, or turn that off"
        )
    legal = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0 and works(size)]
    below = [size * each for size in legal if size < ranks][-4:]
    above = [size * each for size in legal if size > ranks][:4]
    conditions = "equal micro-batches"
    if group_size > 1:
        conditions = f"equal micro-batches of a multiple of {group_size} ({why_grouped})"
    if max_micro_batch is not None:
        conditions += f" of at most {max_micro_batch} samples (train.max_micro_batch)"
    choices = ", ".join(map(str, [*below, *above]))
    remedy = f"use {choices} processes, or" if choices else "no number of processes works:"
    who = f"{ranks} processes" if each == 1 else f"{ranks} data-parallel ranks of {each} processes"
    return (
        f"train.global_batch_size is {global_batch_size}, which {who} cannot divide into {conditions}: "
        f"{remedy} change train.global_batch_size (a multiple of {ranks * group_size} always works)"
    )
