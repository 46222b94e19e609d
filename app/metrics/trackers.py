"""Sends the numbers of metrics.jsonl and evaluations.jsonl to trackers (TensorBoard, wandb, mlflow, ...).

Only the main process has trackers. A start that goes on with a run goes on with its run in each tracker too, and no step is
there twice. What a tracker's library raises never ends the training: the tracker is switched off with one sentence, and the
files of the run folder have everything. A tracker's library is imported only where it is asked for.

They are those of the first micro-batch of the main process, as they go into the model: the same on any topology whose
micro-batches have as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from app.data.samples import Batch
from app.errors import RunFolderError
from app.runs import run_folder
from app.runs.claim import Claim
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


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, at one of its starts."""

    claim: Claim
    """What writes into the run folder."""
    project: str
    """What is learnt, by the recipe's name: runs to be compared are in one project (experiment)."""
    first_step: int
    """Steps that were taken before, of which the run folder has the lines."""
    logged: Mapping[str, int]
    """The last step that earlier starts wrote into each file of the run folder."""
    kept: Mapping[str, int]
    """The last step of each that is still there: what came after the checkpoint is taken again."""
    known: Mapping[str, str]
    """The run's id in each tracker that has it from an earlier start."""
    scores: Sequence[str]
    """Those that trackers may show beside the settings of the run."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.claim.path

    @property
    def name(self) -> str:
        """The run's name among those of its project."""
        return self.folder.resolve().name

    def remember(self, tracker: str, identity: str) -> None:
        """Keep the id that the run has in a tracker, for the next start."""
        self.claim.write_json(run_folder.TRACKERS, {**_known(self.folder), tracker: identity})


def _known(folder: Path) -> dict[str, str]:
    """The run's ids, as far as the file can be read: a run whose ids are lost is a new one to its trackers."""
    place = folder / run_folder.TRACKERS
    try:
        known = run_folder.read_json(place) if place.exists() else {}
    except RunFolderError as error:
        print(f"note: {error} Its trackers will show it as a new run.", flush=True)  # noqa: T201 - the user must know
        return {}
    return {name: identity for name, identity in known.items() if isinstance(identity, str)}


def tracked(claim: Claim, *, project: str, first_step: int, logged: Mapping[str, int], scores: Sequence[str] = ()) -> Tracked:
    """Return the run of a folder that was opened to go on after `first_step` steps; `logged` is what it held before.

    A run that begins again, for it had no checkpoint, is a new one to its trackers.
    """
    if first_step == 0:
        claim.remove(run_folder.TRACKERS)
    kept = run_folder.last_steps(claim.path)
    known = _known(claim.path)
    return Tracked(claim=claim, project=project, first_step=first_step, logged=logged, kept=kept, known=known, scores=scores)


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
