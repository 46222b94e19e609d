"""TensorBoard: scalars, pictures and hyperparameters in RUN/tensorboard, one folder for all starts of a run.

A start that goes on tells TensorBoard to forget what an earlier one wrote of later steps (`purge_step`). For its HPARAMS page
TensorBoard needs the hyperparameters, and the names of scalars of the same folder to show beside them: the test scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from app import run_folder
from app.trackers.tracked import Tracked

_SCORES = ("test_accuracy", "test_loss")
_HPARAMS_SUFFIX = ".hparams"


class TensorBoard:
    """Has the methods of Accelerate's trackers that are used here."""

    def __init__(self, run: Tracked, settings: dict[str, Any]) -> None:
        """`settings` are the hyperparameters."""
        self._folder = run.folder / run_folder.TENSORBOARD
        purge_step = run.first_step + 1 if self._folder.exists() else None
        run.remember("tensorboard", self._folder.name)
        # The hyperparameters come first: TensorBoard reads the files of a folder in the order of their times, and leaves one
        # for good when the next is there.
        self._write_hyperparameters(settings)
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def _write_hyperparameters(self, settings: dict[str, Any]) -> None:
        """Write them in place of those of an earlier start: of two, TensorBoard would show the first."""
        for earlier in self._folder.glob(f"*{_HPARAMS_SUFFIX}"):
            earlier.unlink()
        experiment, session, _ = hparams(settings, dict.fromkeys(_SCORES, 0.0))
        with SummaryWriter(str(self._folder), filename_suffix=_HPARAMS_SUFFIX) as writer:
            for summary in (experiment, session):
                writer.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write numbers; they are in the file when this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_images(self, values: Mapping[str, Sequence[Any]], *, step: int) -> None:
        """Write the one picture, uint8 [H, W, 3], of each name."""
        for name, (picture,) in values.items():
            self._writer.add_image(name, picture, step, dataformats="HWC")

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
