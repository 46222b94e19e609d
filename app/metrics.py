"""What a run measures of itself: the loss over whole global batches, the rate, the wait, and where they are written.

Nothing here makes the device wait between two logs: losses stay tensors until they are logged, and one reduction then
covers all steps since the last log. Only the main process writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from app import run_folder
from app.errors import TrainingError
from app.steps import Step


@dataclass
class Clock:
    """Seconds of training, with pauses (evaluation, saving) kept apart."""

    _since_s: float = field(default_factory=time.perf_counter)
    _spent_s: float = 0.0
    waiting_s: float = 0.0
    """Time the training waited for data."""
    held_s: float = 0.0
    """Time the training was held by saving."""
    written_s: float | None = None
    """Time that writing took of the save that came to its end since the last log, if one did."""

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training."""
        self._spent_s = self.training_s
        try:
            yield
        finally:
            self._since_s = time.perf_counter()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        start_s = time.perf_counter()
        with self.paused():
            yield
        self.held_s += time.perf_counter() - start_s

    def wait_for(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, counting the time until it is there."""
        start_s = time.perf_counter()
        batch = next(batches)
        self.waiting_s += time.perf_counter() - start_s
        return batch


class Metrics:
    """Collects each step's loss, and writes a line every so many steps."""

    def __init__(
        self, accelerator: Accelerator, run_dir: Path, *, global_batch_size: int, record_samples: bool, first_step: int = 0
    ) -> None:
        self.clock = Clock()
        self._accelerator, self._run_dir, self._global_batch_size = accelerator, run_dir, global_batch_size
        self._record_samples = record_samples
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self._step_loss = torch.zeros_like(self._loss_sum)
        self._steps: list[Step] = []
        self._skipped_in_row = 0
        self._samples: list[int] = []
        self._logged_steps, self._logged_training_s, self._logged_waiting_s, self._logged_held_s = first_step, 0.0, 0.0, 0.0

    def add(self, loss_sum: torch.Tensor, samples: torch.Tensor) -> None:
        """Take in one forward pass: its summed loss (scalar) and its sample numbers (int64 [micro-batch])."""
        self._step_loss += loss_sum.detach()
        if self._record_samples:
            self._samples += self._accelerator.gather(samples).tolist()

    def end_step(self, step: int, taken: Step) -> None:
        """Finish step `step` (1 is the first), of which a skipped one has no part in the loss; write its samples if wanted."""
        self._steps.append(taken)
        if isinstance(taken.skipped, torch.Tensor):
            self._loss_sum += self._step_loss.masked_fill_(taken.skipped, 0.0)
        elif not taken.skipped:
            self._loss_sum += self._step_loss
        self._step_loss.zero_()
        if self._record_samples:
            self._append(run_folder.SAMPLES, {"step": step, "samples": self._samples})
            self._samples = []

    def log(self, step: int, *, epoch: int, learning_rate: float) -> dict[str, Any]:
        """Write the line of step `step`, covering all steps since the last line, and return it. All ranks call it.

        Raises TrainingError, on all ranks, if the loss is not finite although the gradients were.
        """
        steps = step - self._logged_steps
        skipped = self._skipped()
        applied = steps - len(skipped)
        loss = self._accelerator.reduce(self._loss_sum, "sum").item() / (max(applied, 1) * self._global_batch_size)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} somewhere in steps {self._logged_steps + 1} to {step} (learning rate {learning_rate:g}): "
                "lower optim.lr, lengthen the warm-up, or set optim.clip_norm."
            )
        training_s = self.clock.training_s
        elapsed_s = training_s - self._logged_training_s
        line = {
            "step": step,
            "samples_seen": step * self._global_batch_size,
            "epoch": epoch,
            "loss": loss if applied else None,
            "learning_rate": learning_rate,
            "grad_norm": norm if math.isfinite(norm := float(self._steps[-1].grad_norm)) else None,
            "skipped_steps": skipped,
            "samples_per_s": steps * self._global_batch_size / elapsed_s,
            "data_wait_share": (self.clock.waiting_s - self._logged_waiting_s) / elapsed_s,
            "training_s": training_s,
            "saving_held_s": self.clock.held_s - self._logged_held_s,
            "saving_written_s": self.clock.written_s,
        }
        self._loss_sum.zero_()
        self._steps = []
        self._logged_held_s, self.clock.written_s = self.clock.held_s, None
        self._logged_steps, self._logged_training_s, self._logged_waiting_s = step, training_s, self.clock.waiting_s
        self._write(run_folder.METRICS, line)
        return line

    @property
    def skipped_in_row(self) -> int:
        """Steps that were skipped one after the other, up to the last log."""
        return self._skipped_in_row

    def _skipped(self) -> list[int]:
        """The numbers of the steps skipped since the last log."""
        flags = [bool(taken.skipped) for taken in self._steps]
        for flag in flags:
            self._skipped_in_row = self._skipped_in_row + 1 if flag else 0
        return [self._logged_steps + index for index, flag in enumerate(flags, start=1) if flag]

    def record_evaluation(self, step: int, *, epoch: int, scores: Mapping[str, float]) -> None:
        """Write down the named scores of the weights after `step` steps."""
        place = {"step": step, "samples_seen": step * self._global_batch_size, "epoch": epoch}
        self._write(run_folder.EVALUATIONS, {**place, **scores})

    def _write(self, name: str, line: dict[str, Any]) -> None:
        self._append(name, line)
        numbers = {key: value for key, value in line.items() if isinstance(value, (int, float)) and key != "step"}
        self._accelerator.log(numbers, step=line["step"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._accelerator.is_main_process:
            with (self._run_dir / name).open("a") as file:
                file.write(json.dumps(line) + "\n")
