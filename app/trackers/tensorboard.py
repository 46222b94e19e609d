"""TensorBoard: scalars, pictures and hyperparameters in RUN/tensorboard, one folder for all starts of a run.

A start that goes on tells TensorBoard to forget what an earlier one wrote of later steps, or still writes. For its HPARAMS page
TensorBoard needs the hyperparameters, and the names of scalars of the same folder to show beside them: the run's main scores.

The records are TensorBoard's own; its writer of files is not used, since it opens a file anew, by its name, for each record.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, scalar, text

from app.record import run_folder
from app.record.claim import Claim
from app.trackers.tracked import Tracked

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
