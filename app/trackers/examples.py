"""What the model is given, shown by trackers: a picture that the task makes of the first samples of a batch.

They are those of the first micro-batch of the main process, as they go into the model: the same on any topology whose
micro-batches have as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.data.samples import Batch
from app.trackers.trackers import Trackers


class Examples:
    """Shows samples of the first steps of epochs 1, 2, 3, 5, 9, ...: later ones look no different, and each takes space."""

    def __init__(
        self, trackers: Trackers, look: Callable[[Batch, int, str], tuple[str, Any]] | None, *, count: int, steps_per_epoch: int
    ) -> None:
        """`count` samples are shown at most, if a tracker shows pictures; `look` is the task's, if it has one."""
        self._trackers, self._look = trackers, look
        self._count = count if trackers.take_pictures else 0
        self._steps_per_epoch = steps_per_epoch

    def see(self, step: int, micro_batch: int, batch: Batch) -> None:
        """Show what the model is given in a micro-batch of a step (both from 0), if it is time to."""
        if self._look is None or self._count == 0 or micro_batch or step % self._steps_per_epoch:
            return
        epoch = step // self._steps_per_epoch
        if epoch & (epoch - 1):
            return
        count = min(self._count, len(batch["samples"]))
        title = f"{count} of the samples of step {step + 1}, the first of epoch {epoch + 1}"
        name, picture = self._look(batch, count, title)
        self._trackers.show(name, picture, step=step + 1)
