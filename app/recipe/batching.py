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
        several, each = self.data_ranks > 1, self.tensor_parallel
        ranks = f"data-parallel rank{'s' * several} of {each} processes" if each > 1 else f"process{'es' * several}"
        batches = f"micro-batch {self.micro_batch} x accumulation {self.accumulation}"
        return f"global batch {self.global_batch_size} = {batches} x {self.data_ranks} {ranks}"

    @property
    def passes(self) -> int:
        """Forward passes of a step, on all ranks together."""
        return self.data_ranks * self.accumulation

    @classmethod
    def of(cls, recipe: Recipe, data_ranks: int, *, tensor_parallel: int = 1) -> BatchPlan:
        """Return the plan with the fewest forward passes whose micro-batch is at most `train.max_micro_batch` samples.

        Every micro-batch contains whole groups of the task's `group_size` samples (mixup mixes pairs).
        Raises RecipeError, which names possible numbers of processes, if no plan exists.
        """
        global_batch_size, max_micro_batch = recipe.train.global_batch_size, recipe.train.max_micro_batch
        group_size, why_grouped = recipe.sections.group_size, recipe.sections.why_grouped

        def passes(ranks: int) -> int | None:
            share, rest = divmod(global_batch_size, ranks)
            most = max_micro_batch or share
            fitting = (it for it in range(1, share + 1) if share % (it * group_size) == 0 and share // it <= most)
            return None if rest else next(fitting, None)

        if accumulation := passes(data_ranks):
            sizes = {"global_batch_size": global_batch_size, "data_ranks": data_ranks, "tensor_parallel": tensor_parallel}
            return cls(**sizes, accumulation=accumulation)
        legal = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0 and passes(size)]
        near = sorted(sorted(legal, key=lambda size: abs(size - data_ranks))[:8])
        choices = ", ".join(str(size * tensor_parallel) for size in near)
        remedy = f"use {choices} processes, or" if choices else "no number of processes works:"
        conditions = (
            f"equal micro-batches of a multiple of {group_size} ({why_grouped})" if group_size > 1 else "equal micro-batches"
        )
        if max_micro_batch is not None:
            conditions += f" of at most {max_micro_batch} samples (train.max_micro_batch)"
        ranks = f"{data_ranks} data-parallel ranks of {tensor_parallel}" if tensor_parallel > 1 else f"{data_ranks}"
        raise RecipeError(
            f"train.global_batch_size is {global_batch_size}, which {ranks} processes cannot divide into {conditions}: "
            f"{remedy} change train.global_batch_size (a multiple of {data_ranks * group_size} always works)"
        )
