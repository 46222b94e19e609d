"""Sends the numbers of metrics.jsonl and evaluations.jsonl to trackers (TensorBoard, wandb, mlflow, trackio).

What the user sets in the trackers' own variables counts. Imported only where one of them is asked for.

A resumed start tells TensorBoard to forget what an earlier one wrote of later steps, or still writes. For its HPARAMS page
TensorBoard needs the hyperparameters, and the names of scalars of the same folder to show with them: the run's main scores. It
reads the first ones of a folder alone, so they are the first attempt's.

The records are TensorBoard's own; its writer of files is not used, since it opens a file anew, by its name, for each record.

Only the main process has trackers. A resumed start continues the run in each tracker too, and no step is there twice. What a
tracker's library raises never ends the training: the tracker is switched off with one sentence, and the files of the run folder
have everything. A tracker's library is imported only where it is asked for.

Pictures show samples of the main process's first micro-batch as the model gets them: the same ones on any topology with
micro-batches of this size.
"""

from __future__ import annotations

import io
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, MLflowTracker, TrackioTracker, WandBTracker
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, image, scalar, text

from app.data.samples import Batch
from app.errors import RunFolderError
from app.runs import run_folder
from app.runs.claim import Claim
from app.task import Task


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, at one of its starts."""

    claim: Claim
    """Writes into the run folder."""
    project: str
    """Name of the recipe: runs to be compared are in one project (experiment)."""
    first_step: int
    """Steps that were taken before, of which the run folder has the lines."""
    logged: Mapping[str, int]
    """The last step that earlier starts wrote into each file of the run folder."""
    known: dict[str, str]
    """The run's id in each tracker."""
    scores: Sequence[str]
    """Values that trackers may show next to the settings of the run."""

    @property
    def name(self) -> str:
        """The run's name within its project."""
        return self.claim.path.resolve().name

    def remember(self, tracker: str, identity: str) -> None:
        """Keep the id that the run has in a tracker, for the next start."""
        self.known[tracker] = identity
        self.claim.write_json(run_folder.TRACKERS, self.known)


def tracked(claim: Claim, *, project: str, first_step: int, logged: Mapping[str, int], scores: Sequence[str] = ()) -> Tracked:
    """Return the run of a folder that was opened to go on after `first_step` steps; `logged` is what it held before.

    A run that begins again, for it had no checkpoint, is a new one to its trackers, and so is one whose ids are damaged.
    """
    path, known = claim.path / run_folder.TRACKERS, dict[str, str]()
    if first_step == 0:
        claim.remove(run_folder.TRACKERS)
    try:
        known = run_folder.read_json(path) if path.exists() else known
    except RunFolderError as error:
        print(f"note: {error} Its trackers will show it as a new run.", flush=True)  # noqa: T201 - the user must know
    return Tracked(claim=claim, project=project, first_step=first_step, logged=logged, known=known, scores=scores)


def _start_wandb(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for wandb; without a key or a network it writes what `wandb sync` sends later.

    On many clusters compute nodes reach no server, and all ranks wait for the main one: an answer may take 15 seconds, and
    sending at the end 60. What is not sent by then stays on the disk.
    """
    import wandb

    defaults = {
        "WANDB_RUN_ID": ("run_id", run.known.get("wandb", uuid.uuid4().hex[:8])),
        "WANDB_RESUME": ("resume", "allow"),
        "WANDB_NAME": ("run_name", run.name),
        "WANDB_DIR": ("root_dir", str(run.claim.path)),
        "WANDB_INIT_TIMEOUT": ("init_timeout", 15),
        "WANDB_FINISH_TIMEOUT": ("finish_timeout", 60),
    }
    unset: dict[str, Any] = dict(setting for variable, setting in defaults.items() if variable not in os.environ)
    project, options = os.environ.get("WANDB_PROJECT", run.project), {"config": settings, "settings": wandb.Settings(**unset)}
    tracker = WandBTracker(project, **options)
    try:
        tracker.start()
    except wandb.Error as error:
        wandb.teardown()  # what has not started still holds the run's id
        tracker = WandBTracker(project, mode="offline", **options)
        tracker.start()
        print(  # noqa: T201 - the user must know
            f"note: wandb works offline here ({' '.join(str(error).split())}): from a machine with a network and a key, "
            f"`wandb sync {run.claim.path}/wandb/offline-*` sends the run. WANDB_MODE=offline skips the attempt.",
            flush=True,
        )
    run.remember("wandb", tracker.run.id)
    return tracker


def _start_mlflow(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for mlflow; without MLFLOW_TRACKING_URI it writes RUN/mlflow.db and RUN/mlflow."""
    import mlflow

    artifacts, known = None, run.known.get("mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        artifacts = (run.claim.path / "mlflow").resolve().as_uri()
        mlflow.set_tracking_uri(f"sqlite:///{(run.claim.path / 'mlflow.db').resolve()}")
    tracker = MLflowTracker(run.project, artifacts, run_id=known, run_name=run.name)
    tracker.start()
    run.remember("mlflow", tracker.tracker.info.run_id)
    if known is None:  # mlflow refuses a parameter that changes, as the length of a run may
        tracker.store_init_configuration(settings)
    return tracker


def _start_trackio(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for trackio, which knows a run by its name alone."""
    name = run.known.get("trackio", f"{run.name}-{uuid.uuid4().hex[:6]}")
    tracker = TrackioTracker(run.project, name=name, resume="allow", config=settings)
    tracker.start()
    run.remember("trackio", name)
    return tracker


_FORMAT = "brain.Event:2"
_SPLITS = ("validation", "test")
_OF_TIME = ("_s", "_share", "_per_s_per_device", "memory_bytes", "mfu")
"""Endings of the names of measurements of the machine."""


def tag(name: str) -> str:
    """Return under which tag a number of the run's files is shown: validation/accuracy for validation_accuracy.

    Losses that have curves are a group of their own, the first in the alphabet: loss/train, loss/validation.
    """
    split, _, own = name.partition("_")
    if split not in _SPLITS or not own:
        split, own = "time" if name.endswith(_OF_TIME) else "train", name
    return f"loss/{split}" if own == "loss" and split != "test" else f"{split}/{own}"


class TensorBoard:
    """Has the methods of Accelerate's trackers that are used here."""

    def __init__(self, run: Tracked, settings: dict[str, Any]) -> None:
        """`settings` are the hyperparameters."""
        folder = run.claim.path / run_folder.TENSORBOARD
        is_resumed = folder.exists()
        run.remember("tensorboard", folder.name)
        self._claim = run.claim
        self._file = f"{folder.name}/events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        if is_resumed:  # so TensorBoard forgets everything from this step on in earlier files
            step = run.first_step + 1
            self._add(Event(step=step, file_version=_FORMAT))
            self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        else:
            experiment, session, _ = hparams(settings, dict.fromkeys(map(tag, run.scores), 0.0))
            names = dict.fromkeys(score.partition("_")[2] for score in reversed(run.scores))  # the loss is first
            together = {name: ["Multiline", [tag(name), tag(f"validation_{name}")]] for name in names}
            charts = custom_scalars({"training and validation": together})
            self._add(Event(file_version=_FORMAT), *(Event(summary=each) for each in (experiment, session, charts)))

    def _add(self, *events: Any) -> None:
        """Write events, with the time; they are in the file when this returns."""
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        self._claim.append_bytes(self._file, buffer.getvalue())

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write numbers."""
        self._add(*(Event(step=step, summary=scalar(tag(name), value)) for name, value in values.items()))

    def log_images(self, values: Mapping[str, Sequence[Any]], *, step: int) -> None:
        """Write the one image, uint8 [H, W, 3], of each name."""
        for name, (pixels,) in values.items():
            self._add(Event(step=step, summary=image(f"samples/{name}", pixels, dataformats="HWC")))

    def log_text(self, title: str, value: str, *, step: int) -> None:
        """Write a text unchanged: in a block of code, since TensorBoard takes it for Markdown."""
        block = "".join(f"    {line}\n" for line in value.splitlines())
        self._add(Event(step=step, summary=text(title, block)))

    def finish(self) -> None:
        """Nothing is left to be written."""


_STARTS: Mapping[str, Callable[[Tracked, dict[str, Any]], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": _start_wandb,
    "mlflow": _start_mlflow,
    "trackio": _start_trackio,
}
_WITH_PICTURES = ("tensorboard", "wandb")


class Trackers:
    """The trackers of one start; none, on other processes than the main one."""

    def __init__(self) -> None:
        self._on: dict[str, Any] = {}
        """Trackers that are on, by their names: Accelerate's, or what has the same methods."""
        self._logged: dict[str, Mapping[str, int]] = {}
        """The last step that each has of each file of the run folder."""

    def start(self, names: Sequence[str], run: Tracked, settings: Mapping[str, Any]) -> None:
        """Start the named trackers, and show them the recipe's `settings` by their flat keys."""
        scalars = {key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in settings.items()}
        for name in names:
            self._logged[name] = run.logged if name in run.known else {}
            if name == "tensorboard":  # it forgets what is taken again; the others cannot, so they do not get it again
                self._logged[name] = {file: min(step, run.first_step) for file, step in self._logged[name].items()}
            with self._guarded(name):
                if name in _STARTS:
                    self._on[name] = _STARTS[name](run, scalars)
                    continue
                kind = LOGGER_TYPE_TO_CLASS[name]
                tracker = kind(run.project, str(run.claim.path)) if kind.requires_logging_directory else kind(run.project)
                tracker.start()
                tracker.store_init_configuration(scalars)
                self._on[name] = tracker

    @property
    def take_pictures(self) -> bool:
        """True if one of them shows images."""
        return any(name in _WITH_PICTURES for name in self._on)

    def log(self, file: str, numbers: Mapping[str, float], *, step: int) -> None:
        """Show the numbers of a line of `file`, unless the tracker has them from an earlier start."""
        for name, tracker in list(self._on.items()):
            if step > self._logged[name].get(file, 0):
                with self._guarded(name):
                    tracker.log(dict(numbers), step=step)

    def log_image(self, title: str, pixels: Any, *, step: int) -> None:
        """Show a picture, uint8 [H, W, 3] (an array)."""
        for name in [name for name in _WITH_PICTURES if name in self._on]:
            with self._guarded(name):
                self._on[name].log_images({title: [pixels]}, step=step)

    def log_text(self, title: str, text: str, *, step: int) -> None:
        """Show a text that was made after an evaluation; TensorBoard does, unless it has it from an earlier start."""
        if "tensorboard" in self._on and step > self._logged["tensorboard"].get(run_folder.EVALUATIONS, 0):
            with self._guarded("tensorboard"):
                self._on["tensorboard"].log_text(title, text, step=step)

    def finish(self) -> None:
        """Have them write and send what they still hold."""
        for name, tracker in list(self._on.items()):
            with self._guarded(name):
                tracker.finish()
        self._on = {}

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Switch the tracker off, and say so, if the block raises: its library may raise anything."""
        try:
            yield
        except Exception as error:
            self._on.pop(name, None)
            print(  # noqa: T201 - the user must know
                f"note: the tracker {name} is switched off, because it failed ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}). The run continues, and its folder has everything.",
                flush=True,
            )


class SamplePreviews:
    """Shows samples of the first steps of epochs 1, 2, 3, 5, 9, ...: later ones look no different, and each takes space."""

    def __init__(self, trackers: Trackers, task: Task, *, count: int, steps_per_epoch: int) -> None:
        """`count` samples are shown at most, if a tracker shows pictures."""
        self._trackers, self._task = trackers, task
        self._count = count if trackers.take_pictures else 0
        self._steps_per_epoch = steps_per_epoch

    def see(self, step: int, micro_batch: int, batch: Batch) -> None:
        """Show what the model is given in a micro-batch of a step (both from 0), if it is time to."""
        epoch, step_of_epoch = divmod(step, self._steps_per_epoch)
        if self._count == 0 or micro_batch or step_of_epoch or epoch & (epoch - 1):
            return
        count = min(self._count, len(batch["samples"]))
        name, picture = self._task.preview(batch, count)
        if not isinstance(picture, str):
            self._trackers.log_image(name, picture, step=step + 1)
