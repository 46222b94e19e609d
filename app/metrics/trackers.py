"""Sends the numbers of metrics.jsonl and evaluations.jsonl to trackers (TensorBoard, wandb, mlflow, ...).

Only the main process has trackers. A start that goes on with a run goes on with its run in each tracker too, and no step is
there twice. What a tracker's library raises never ends the training: the tracker is switched off with one sentence, and the
files of the run folder have everything. A tracker's library is imported only where it is asked for.

Pictures show samples of the main process's first micro-batch as the model gets them: the same ones on any topology with
micro-batches of this size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from app.data.samples import Batch
from app.metrics.tracked_run import Tracked
from app.runs import run_folder
from app.task import Task

_WITH_PICTURES = ("tensorboard", "wandb")


@dataclass(frozen=True)
class _On:
    """A tracker that is on."""

    name: str
    tracker: Any
    """One of Accelerate's trackers, or what has the same methods."""
    has: Mapping[str, int]
    """The last step that it has of each file of the run folder."""


class Trackers:
    """The trackers of one start; none, on other processes than the main one."""

    def __init__(self) -> None:
        self._on: list[_On] = []

    def start(self, names: Sequence[str], run: Tracked, settings: Mapping[str, Any]) -> None:
        """Start the named trackers, and show them the recipe's `settings` by their flat keys."""
        scalars = {key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in settings.items()}
        for name in dict.fromkeys(names):
            with self._guarded(name):
                # TensorBoard forgets what is taken again; the others cannot, so it is not told to them again.
                has = run.kept if name == "tensorboard" else run.logged
                self._on.append(_On(name, _start(name, run, scalars), has if name in run.known else {}))

    @property
    def take_pictures(self) -> bool:
        """Whether one of them shows pictures."""
        return any(on.name in _WITH_PICTURES for on in self._on)

    def log(self, file: str, numbers: Mapping[str, float], *, step: int) -> None:
        """Show the numbers of a line of `file`, unless the tracker has them from an earlier start."""
        self._each(lambda on: on.tracker.log(dict(numbers), step=step) if step > on.has.get(file, 0) else None)

    def show(self, name: str, picture: Any, *, step: int) -> None:
        """Show a picture, uint8 [H, W, 3] (an array), under a name."""
        self._each(lambda on: on.tracker.log_images({name: [picture]}, step=step) if on.name in _WITH_PICTURES else None)

    def tell(self, title: str, text: str, *, step: int) -> None:
        """Show a text that was made after an evaluation; TensorBoard does, unless it has it from an earlier start."""
        self._each(
            lambda on: (
                on.tracker.log_text(title, text, step=step)
                if on.name == "tensorboard" and step > on.has.get(run_folder.EVALUATIONS, 0)
                else None
            )
        )

    def finish(self) -> None:
        """Have them write and send what they still hold."""
        self._each(lambda on: on.tracker.finish())
        self._on = []

    def _each(self, act: Callable[[_On], Any]) -> None:
        for on in list(self._on):
            with self._guarded(on.name):
                act(on)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Switch the tracker off, and say so, if the block raises: its library may raise anything."""
        try:
            yield
        except Exception as error:
            self._on = [on for on in self._on if on.name != name]
            print(  # noqa: T201 - the user must know
                (
                    f"note: the tracker {name} is switched off, because it failed ({type(error).__name__}: "
                    f"{_shortened(error)}). The run continues, and its folder has everything that the tracker "
                    "would have received."
                ),
                flush=True,
            )


def _start(name: str, run: Tracked, settings: dict[str, Any]) -> Any:
    # Imported here: what is not asked for is not imported.
    if name == "tensorboard":
        from app.metrics.tracker_services import TensorBoard

        return TensorBoard(run, settings)
    from app.metrics import tracker_services

    if name in tracker_services.STARTED_BY:
        return tracker_services.STARTED_BY[name](run, settings)
    kind = LOGGER_TYPE_TO_CLASS[name]
    tracker = kind(run.project, str(run.folder)) if kind.requires_logging_directory else kind(run.project)
    tracker.start()
    tracker.store_init_configuration(settings)
    return tracker


def _shortened(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


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
