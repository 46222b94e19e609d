"""What the model is given, shown by trackers: a picture that the task makes of the first samples of a batch.

They are those of the first micro-batch of the main process, as they go into the model: the same on any topology whose
micro-batches have as many.
"""

from __future__ import annotations

from app.data.samples import Batch
from app.task import Task
from app.trackers.trackers import Trackers


class Examples:
    """Shows samples of the first steps of epochs 1, 2, 3, 5, 9, ...: later ones look no different, and each takes space."""

    def __init__(self, trackers: Trackers, task: Task, *, count: int, steps_per_epoch: int) -> None:
        """`count` samples are shown at most, if a tracker shows pictures."""
        self._trackers, self._task = trackers, task
        self._count = count if trackers.take_pictures else 0
        self._steps_per_epoch = steps_per_epoch

    def see(self, step: int, micro_batch: int, batch: Batch) -> None:
        """Show what the model is given in a micro-batch of a step (both from 0), if it is time to."""
        if self._count == 0 or micro_batch or step % self._steps_per_epoch:
            return
        epoch = step // self._steps_per_epoch
        if epoch & (epoch - 1):
            return
        count = min(self._count, len(batch["samples"]))
        name, picture = self._task.preview(batch, count)
        self._trackers.show(name, picture, step=step + 1)
