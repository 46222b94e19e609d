"""What a run measures of itself: the loss over whole global batches, the rate, the wait, and where they are written.

Nothing here makes the device wait between two logs: losses stay tensors until they are logged, and one reduction then
covers all steps since the last log. Only the main process writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from app import ledger, run_folder
from app.errors import TrainingError


@dataclass
class Clock:
    """Seconds of training, with pauses (evaluation, saving) kept apart."""

    _since_s: float = field(default_factory=time.perf_counter)
    _spent_s: float = 0.0
    waiting_s: float = 0.0
    """Time the training waited for data."""
    pause_s: float = 0.0
    """Length of the last pause."""

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training."""
        self._spent_s, start_s = self.training_s, time.perf_counter()
        try:
            yield
        finally:
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    def wait_for(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, counting the time until it is there."""
        start_s = time.perf_counter()
        batch = next(batches)
        self.waiting_s += time.perf_counter() - start_s
        return batch


class _Fed:
    """What this process was fed, as one number a step: made on the device, and nothing waits for it."""

    # Hashing many batches at once costs what hashing one of them does, and few enough are kept that it needs no memory.
    _BATCHES = 64

    def __init__(self) -> None:
        self._batches: list[torch.Tensor] = []
        self._steps = 0
        self._digests: list[torch.Tensor] = []

    def add(self, samples: torch.Tensor) -> None:
        """Take in the sample numbers, int64 [micro-batch], of one forward pass."""
        self._batches.append(samples)

    def end_step(self) -> None:
        """Finish a step; all steps have equally many forward passes."""
        self._steps += 1
        if len(self._batches) >= self._BATCHES:
            self._hash()

    def take(self) -> torch.Tensor:
        """Return the digests, int64 [steps], of all steps since the last call, of which there is at least one."""
        if self._batches:
            self._hash()
        digests, self._digests = torch.cat(self._digests), []
        return digests

    def _hash(self) -> None:
        self._digests.append(ledger.digest(torch.stack(self._batches).view(self._steps, -1)))
        self._batches, self._steps = [], 0


class Metrics:
    """Collects each step's loss and samples, and writes a line every so many steps."""

    def __init__(
        self, accelerator: Accelerator, run_dir: Path, *, global_batch_size: int, record_samples: bool, first_step: int = 0
    ) -> None:
        self.clock = Clock()
        self._accelerator, self._run_dir, self._global_batch_size = accelerator, run_dir, global_batch_size
        self._record_samples = record_samples
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        self._samples: list[int] = []
        self._logged_steps, self._logged_training_s, self._logged_waiting_s = first_step, 0.0, 0.0
        self._fed, self._skipped, self._ended_steps = _Fed(), list[int](), first_step
        self._recorded_steps, self._recorded_training_s, self._recorded_waiting_s = first_step, 0.0, 0.0

    def add(self, loss_sum: torch.Tensor, samples: torch.Tensor) -> None:
        """Take in one forward pass: its summed loss (scalar) and its sample numbers (int64 [micro-batch])."""
        self._loss_sum += loss_sum.detach()
        self._fed.add(samples)
        if self._record_samples:
            self._samples += self._accelerator.gather(samples).tolist()

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Finish step `step` (1 is the first); writes its samples if they are recorded. `skipped`: it was not applied."""
        self._fed.end_step()
        self._ended_steps = step
        if skipped:
            self._skipped.append(step)
        if self._record_samples:
            self._append(run_folder.SAMPLES, {"step": step, "samples": self._samples})
            self._samples = []

    def log(self, step: int, *, epoch: int, learning_rate: float, grad_norm: Any) -> dict[str, Any]:
        """Write the line of step `step`, covering all steps since the last line, and return it. All ranks call it.

        Raises TrainingError, on all ranks, if the loss is not finite.
        """
        steps = step - self._logged_steps
        loss = self._accelerator.reduce(self._loss_sum, "sum").item() / (steps * self._global_batch_size)
        self._record_steps()
        if not torch.isfinite(torch.tensor(loss)):
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
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "samples_per_s": steps * self._global_batch_size / elapsed_s,
            "data_wait_share": (self.clock.waiting_s - self._logged_waiting_s) / elapsed_s,
            "training_s": training_s,
        }
        self._loss_sum.zero_()
        self._logged_steps, self._logged_training_s, self._logged_waiting_s = step, training_s, self.clock.waiting_s
        self._write(run_folder.METRICS, line)
        return line

    def flush(self) -> None:
        """Wait until the ledger on the disk has every step that has ended. All ranks call it.

        Comes before a checkpoint is committed and before the run ends early, so that what is done is always recorded.
        """
        self._record_steps()
        if self._accelerator.is_main_process:
            ledger.sync(self._run_dir)

    def _record_steps(self) -> None:
        if self._recorded_steps == self._ended_steps:
            return
        digests = self._accelerator.reduce(self._fed.take(), "sum").tolist()
        training_s, waiting_s = self.clock.training_s, self.clock.waiting_s
        steps = ledger.Steps(
            first=self._recorded_steps + 1,
            last=self._ended_steps,
            digests=tuple(map(ledger.as_text, digests)),
            skipped=tuple(self._skipped),
            training_s=training_s - self._recorded_training_s,
            waiting_s=waiting_s - self._recorded_waiting_s,
        )
        self._record(steps)
        self._skipped, self._recorded_steps = [], self._ended_steps
        self._recorded_training_s, self._recorded_waiting_s = training_s, waiting_s

    def record_saved(self, step: int, *, held_s: float, written_s: float) -> None:
        """Write down that the checkpoint after `step` steps is committed, and the seconds of ledger.Saved."""
        self._record(ledger.Saved(step=step, held_s=held_s, written_s=written_s))

    def _record(self, event: ledger.Event) -> None:
        if self._accelerator.is_main_process:
            ledger.append(self._run_dir, event)

    def record_evaluation(self, step: int, *, epoch: int, scores: Mapping[str, float], held_s: float) -> None:
        """Write down the named scores of the weights after `step` steps, and how long the training stood still for them."""
        self._record(ledger.Evaluated(step=step, held_s=held_s))
        place = {"step": step, "samples_seen": step * self._global_batch_size, "epoch": epoch}
        self._write(run_folder.EVALUATIONS, {**place, **scores})

    def _write(self, name: str, line: dict[str, Any]) -> None:
        self._append(name, line)
        numbers = {key: value for key, value in line.items() if value is not None and key != "step"}
        self._accelerator.log(numbers, step=line["step"])

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._accelerator.is_main_process:
            with (self._run_dir / name).open("a") as file:
                file.write(json.dumps(line) + "\n")
