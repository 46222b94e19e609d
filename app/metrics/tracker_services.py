"""The trackers themselves: TensorBoard's files in RUN/tensorboard, and wandb, mlflow and trackio.

What the user sets in the trackers' own variables counts. Imported only where one of them is asked for.

A start that goes on tells TensorBoard to forget what an earlier one wrote of later steps, or still writes. For its HPARAMS page
TensorBoard needs the hyperparameters, and the names of scalars of the same folder to show beside them: the run's main scores.

The records are TensorBoard's own; its writer of files is not used, since it opens a file anew, by its name, for each record.
"""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.tracking import MLflowTracker, TrackioTracker, WandBTracker
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, scalar, text

from app.errors import TrackerError
from app.metrics.tracked_run import Tracked
from app.runs import run_folder
from app.runs.claim import Claim

_ANSWERS_WITHIN_S = 15
"""How long a server may take to answer. On many clusters compute nodes reach no server, and all ranks wait for the main one."""
_SENT_WITHIN_S = 60
"""How long wandb may keep sending at the end. What is not sent by then stays on the disk."""


def start_wandb(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for wandb; without a key or a network it writes what `wandb sync` sends later."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", run.project)
    timeouts_s = {"init_timeout": _ANSWERS_WITHIN_S, "finish_timeout": _SENT_WITHIN_S, "login_timeout": _SENT_WITHIN_S}
    given = {
        **_unless_set(WANDB_RUN_ID={"id": run.known.get("wandb", uuid.uuid4().hex[:8])}, WANDB_RESUME={"resume": "allow"}),
        **_unless_set(WANDB_NAME={"name": run.name}, WANDB_DIR={"dir": str(run.folder)}),
        "config": settings,
        "settings": wandb.Settings(
            **_unless_set(**{f"WANDB_{key.upper()}": {key: value} for key, value in timeouts_s.items()})
        ),
    }
    try:
        tracker = WandBTracker(project, **given)
        tracker.start()
    except wandb.Error as error:
        wandb.teardown()  # what has not started still holds the run's id
        tracker = WandBTracker(project, mode="offline", **given)
        tracker.start()
        why = " ".join(str(error).split())
        print(  # noqa: T201 - the user must know
            f"note: wandb works offline here ({why}): from a machine with a network and a key, "
            f"`wandb sync {run.folder}/wandb/offline-*` sends the run. WANDB_MODE=offline skips the attempt.",
            flush=True,
        )
    run.remember("wandb", tracker.run.id)
    return tracker


def start_mlflow(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for mlflow; without MLFLOW_TRACKING_URI it writes RUN/mlflow.db and RUN/mlflow."""
    import mlflow
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

    artifacts = None
    if "MLFLOW_TRACKING_URI" not in os.environ:
        if importlib.util.find_spec("sqlalchemy") is None:
            raise TrackerError("mlflow-skinny writes only to servers; set MLFLOW_TRACKING_URI, or install mlflow")
        artifacts = (run.folder / "mlflow").resolve().as_uri()
        mlflow.set_tracking_uri(f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
    # With its own numbers mlflow tries a server that is gone for four minutes (measured), and a silent one for longer.
    for variable, value in ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, 2), (MLFLOW_HTTP_REQUEST_TIMEOUT, _ANSWERS_WITHIN_S)):
        if not variable.is_set():
            variable.set(value)
    tracker = MLflowTracker(run.project, artifacts, run_id=run.known.get("mlflow"), run_name=run.name)
    tracker.start()
    run.remember("mlflow", tracker.tracker.info.run_id)
    if "mlflow" not in run.known:  # mlflow refuses a parameter that changes, as the length of a run may
        tracker.store_init_configuration(settings)
    return tracker


def start_trackio(run: Tracked, settings: dict[str, Any]) -> Any:
    """Start Accelerate's tracker for trackio, which knows a run by its name alone."""
    name = run.known.get("trackio", f"{run.name}-{uuid.uuid4().hex[:6]}")
    tracker = TrackioTracker(run.project, name=name, resume="allow", config=settings)
    tracker.start()
    run.remember("trackio", name)
    return tracker


STARTED_BY: Mapping[str, Callable[[Tracked, dict[str, Any]], Any]] = {
    "wandb": start_wandb,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
}


def _unless_set(**settings: dict[str, Any]) -> dict[str, Any]:
    """Merge the settings of the variables that the user has not set."""
    return {key: value for variable, pairs in settings.items() if variable not in os.environ for key, value in pairs.items()}


_HPARAMS_SUFFIX = ".hparams"
_FORMAT = "brain.Event:2"
_SPLITS = ("validation", "test")
_OF_TIME = ("_s", "_share", "_per_s_per_device", "memory_bytes", "mfu")
"""How the names of what is not learnt, but measured of the machine, end."""


def tag(name: str) -> str:
    """Return under which tag a number of the run's files is shown, in a group: validation/loss for validation_loss."""
    split, _, own = name.partition("_")
    if split in _SPLITS and own:
        return f"{split}/{own}"
    return f"time/{name}" if name.endswith(_OF_TIME) else f"train/{name}"


class TensorBoard:
    """Has the methods of Accelerate's trackers that are used here."""

    def __init__(self, run: Tracked, settings: dict[str, Any]) -> None:
        """`settings` are the hyperparameters."""
        self._claim = run.claim
        folder = run.folder / run_folder.TENSORBOARD
        goes_on = folder.exists()
        run.remember("tensorboard", folder.name)
        # The hyperparameters come first: TensorBoard reads the files of a folder in the order of their times, and leaves one
        # for good when the next is there. Of those of two starts it would show the first.
        for earlier in folder.glob(f"*{_HPARAMS_SUFFIX}"):
            run.claim.remove(f"{folder.name}/{earlier.name}")
        begun = f"{folder.name}/events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        experiment, session, _ = hparams(settings, dict.fromkeys(map(tag, run.scores), 0.0))
        _Events(run.claim, f"{begun}.0{_HPARAMS_SUFFIX}").add(
            Event(file_version=_FORMAT), *(Event(summary=summary) for summary in (experiment, session))
        )
        self._events = _Events(run.claim, f"{begun}.1")
        self._events.add(Event(step=run.first_step + 1 if goes_on else 0, file_version=_FORMAT))
        if goes_on:  # so TensorBoard forgets all from this step on that stands in files before this one
            self._events.add(Event(step=run.first_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write numbers; they are in the file when this returns."""
        self._events.add(*(Event(step=step, summary=scalar(tag(name), value)) for name, value in values.items()))

    def log_images(self, values: Mapping[str, Sequence[Any]], *, step: int) -> None:
        """Write the one picture, uint8 [H, W, 3], of each name."""
        self._events.add(
            *(Event(step=step, summary=image(name, picture, dataformats="HWC")) for name, (picture,) in values.items())
        )

    def log_text(self, title: str, value: str, *, step: int) -> None:
        """Write a text as it is: in a block of code, since TensorBoard takes it for Markdown."""
        block = "".join(f"    {line}\n" for line in value.splitlines())
        self._events.add(Event(step=step, summary=text(title, block)))

    def finish(self) -> None:
        """Nothing is left to be written."""


class _Events:
    """A file of TensorBoard's events."""

    def __init__(self, claim: Claim, name: str) -> None:
        self._claim, self._name = claim, name

    def add(self, *events: Any) -> None:
        """Write them, with the time; they are in the file when this returns."""
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        self._claim.append_bytes(self._name, buffer.getvalue())
