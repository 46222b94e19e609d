"""The training loop: the only one, and the same for every task, preset, device and number of processes."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from app.building import Feed
from app.checkpoints.checkpoint import Checkpoints
from app.checkpoints.sharded_state import WeightAverage
from app.data.samples import Batch
from app.distributed.control import NOTHING, Control, Patience, Request
from app.distributed.runtime import Runtime
from app.errors import TrainingError
from app.evaluation import Evaluation, number
from app.files.text_files import duration
from app.metrics.metrics import Metrics
from app.metrics.profile import Profile
from app.optim import parameter_groups
from app.optim.schedule import Length
from app.optim.steps import Step, Steps
from app.recipe.schema import Recipe, skipped_upto
from app.task import Loss, Task

_LINES_EVERY_S, _LINES_ON_TERMINAL_EVERY_S, _PROGRESS_EVERY_S = 5.0, 60.0, 0.5
"""Least time between two lines of metrics: one every few seconds shows that a run is alive; more would bury what matters. On a
terminal a line of progress, rewritten in place, shows it."""
_SLOW = 1.1
"""Time of the slowest rank's own work, as a multiple of the ranks' median, above which a line names the rank."""


class Display:
    """Prints what people follow a run by, a line at a time; only on the main process."""

    def __init__(self, *, total_steps: int, is_main: bool, unit: str) -> None:
        """`unit` is what is counted by the second."""
        self._total_steps, self._is_main, self._unit = total_steps, is_main, unit
        # Of a user's terminal both are one. mpirun gives its processes another for stdout, and writes it into a file.
        self._in_place = is_main and os.isatty(0) and os.isatty(1)
        self._shown_s = self._rewritten_s = -math.inf
        self._first: tuple[int, float] | None = None
        """The first step that progress was shown of, and when."""
        self._latest = ""

    def say(self, text: str) -> None:
        """Print lines, each with the time of day."""
        self._write("".join(f"{time.strftime('%H:%M:%S')} {line}\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        """Write a text in the place of the line of progress."""
        if self._is_main:
            sys.stdout.write(f"\r\x1b[K{text}" if self._in_place else text)
            sys.stdout.flush()

    def progress(self, step: int) -> None:
        """Rewrite the line of progress of a terminal after this step, if that was a while ago."""
        now_s = time.perf_counter()
        if not self._in_place or now_s - self._rewritten_s < _PROGRESS_EVERY_S:
            return
        self._rewritten_s = now_s
        first, first_s = self._first = self._first or (step, now_s)  # the steps before it compiled, and filled caches
        left = f"  {duration((now_s - first_s) / (step - first) * (self._total_steps - step))} left" if step > first else ""
        text, width = f"step {step}/{self._total_steps}{left}  {self._latest}", shutil.get_terminal_size().columns
        self._write(f"{text if len(text) < width else text[: width - 1].rpartition('  ')[0]}\r")

    def close(self) -> None:
        """Remove the line of progress: an error may be next."""
        self._write("")

    def show(self, line: Mapping[str, Any]) -> None:
        """Print the latest line of metrics, if it is the last one or the one before was a while ago."""
        step = line["step"]
        loss = "none" if line["loss"] is None else number(line["loss"])
        skipped = f" (skipped steps: {len(line['skipped_steps'])})" if line["skipped_steps"] else ""
        ratio = line["slowest_rank_ratio"] or 1.0
        data = f"waiting for data {line['data_wait_share']:.0%}"
        slow = f"  rank {line['slowest_rank']} is {ratio:.1f} x the median" if ratio > _SLOW else ""
        utilization = "" if line["mfu"] is None else f"  {line['mfu']:.0%} of the device's peak"
        self._latest = (
            f"epoch {line['epoch'] + 1}  loss {loss}{skipped}  lr {line['learning_rate']:.2e}  "
            f"{line[f'{self._unit}_per_s']:,.0f} {self._unit}/s  {data}{utilization}{slow}"
        )
        every_s = _LINES_ON_TERMINAL_EVERY_S if self._in_place else _LINES_EVERY_S
        if time.perf_counter() - self._shown_s >= every_s or step == self._total_steps:
            self._shown_s = time.perf_counter()
            self.say(f"step {step}/{self._total_steps}  {self._latest}")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop uses, prepared for this process."""

    recipe: Recipe
    runtime: Runtime
    task: Task
    model: torch.nn.Module
    steps: Steps
    average: WeightAverage
    feed: Feed
    length: Length
    learning_rate_at: Callable[[int], float]
    evaluations: Mapping[str, Callable[[], Evaluation]]
    """Evaluations by split: `validation` runs during training, and each of them at the end."""
    patience: Patience
    metrics: Metrics
    profile: Profile
    display: Display
    checkpoints: Checkpoints
    control: Control
    first_step: int
    """Steps that the resumed run has already taken."""


@dataclass(frozen=True)
class Ended:
    """How a training ended: it was asked to stop, and has saved a checkpoint, or it is finished."""

    step: int
    """Steps that were taken."""
    stopped_by: Request = NOTHING
    """Whether it stopped, and why."""
    why_early: str = ""
    """Why a finished training has fewer steps than the recipe; empty if it has not."""
    scores: Mapping[str, Evaluation] = field(default_factory=dict)
    """Scores of the final weights of a finished training, by split."""


def train(run: Training) -> Ended:
    """Take the steps of the recipe and return the scores of the final weights, unless asked to stop."""
    scores: Evaluation | None = None
    step = run.first_step
    parameter_groups.set_training(run.model, mode=True)
    with run.feed, closing(run.display):
        while step < run.length.total_steps and not run.patience.is_out:
            run.profile.begin_step(step + 1)
            taken = _take_step(run, step)
            run.average.update(taken.skipped)
            step += 1
            run.display.progress(step)
            run.metrics.end_step(step, taken, run.feed.total)
            ends, is_evaluated = step == run.length.total_steps, _is_evaluated(run, step)
            scores = _score(run, "validation", step) if "validation" in run.evaluations and (ends or is_evaluated) else None
            run.patience.see(scores if is_evaluated else None)  # a longer run has none after the last step
            is_last = ends or run.patience.is_out
            if step % run.recipe.log.every_steps == 0 or is_last:
                _log(run, step, is_last=is_last)
            request = run.control.agreed(step)
            if request.save or run.checkpoints.is_due(step, is_last=is_last, scores=scores):
                run.checkpoints.save(step, scores)
            if request.stop:
                run.checkpoints.finish()
                return Ended(step, request)
    run.checkpoints.finish()
    known = {"validation": scores}
    scores_by_split = {split: known.get(split) or _score(run, split, step) for split in run.evaluations}
    why_early = run.patience.why if step < run.length.total_steps else ""
    if why_early:
        run.display.say(f"ends after step {step} of {run.length.total_steps}: {why_early}")
    return Ended(step, why_early=why_early, scores=scores_by_split)


def _take_step(run: Training, step: int) -> Step:
    """Take an optimizer step on the mean loss of its global batch. Batch and loss are freed when this returns.

    Of a step that the recipe skips, the samples alone are recorded.
    """
    if run.recipe.train.skips(step + 1):
        for batch, _ in run.feed.weighed(step):
            run.metrics.add(None, batch["samples"])
        return run.steps.skip(run.learning_rate_at(step))
    for batch, weight in run.feed.passes(step):
        run.metrics.add(take_pass(run, batch, weight), batch["samples"])
    return run.steps.take(run.learning_rate_at(step))


def take_pass(run: Training, batch: Batch, weight: float | torch.Tensor) -> Loss:
    """Add the gradient of a batch's mean loss, with this weight, to the step's, and return the loss."""
    with run.steps.micro_batch():
        loss = run.task.loss(run.model, batch)
        run.steps.backward(loss.mean, weight)
    return loss


def _log(run: Training, step: int, *, is_last: bool) -> None:
    """Write and show the metrics after this step.

    Raises TrainingError if too many steps in a row were skipped, or at the end all, after pending checkpoints are on disk.
    """
    epoch, rate = (step - 1) // run.length.steps_per_epoch, run.learning_rate_at(step - 1)
    run.display.show(run.metrics.log(step, epoch=epoch, learning_rate=rate))
    most = run.recipe.train.max_skipped_steps
    skipped = run.metrics.skipped_in_row
    by_recipe = sum(end - first for first, end in skipped_upto(run.recipe.train.skip_steps, step))
    if skipped <= most and not (is_last and skipped == step - by_recipe):
        return
    run.checkpoints.finish()
    which = f"the last {skipped} steps up to step {step}" if skipped > most else f"all {skipped} steps of the run"
    samples = ", ".join(map(str, run.feed.samples_of(step - 1)[:8]))
    remedy = "Lower optim.lr, lengthen the warm-up, set optim.clip_norm, raise train.max_gradient_spike or look at the samples"
    raise TrainingError(
        f"{which} were skipped because loss or gradient was not finite or a spike, and train.max_skipped_steps is {most} "
        f"(learning rate {rate:g}; {run.steps.verdict}; the last batch has the samples {samples}, ...). "
        f"{run.checkpoints.latest}. {run.feed.not_finite(step - 1) or remedy}."
    )


def _is_evaluated(run: Training, step: int) -> bool:
    """Return True if the recipe asks for an evaluation after this step."""
    train = run.recipe.train
    epochs = 1 if train.evaluate_every_epochs is None else train.evaluate_every_epochs
    every = train.evaluate_every_steps or epochs * run.length.steps_per_epoch
    return every > 0 and step % every == 0


def _score(run: Training, split: str, step: int) -> Evaluation:
    """Score the weights after this step."""
    epoch = (step - 1) // run.length.steps_per_epoch
    with run.metrics.clock.paused(), run.average.applied():
        scores = run.evaluations[split]()
    run.metrics.record_texts(step, scores.texts)
    run.metrics.record_evaluation(step, epoch=epoch, scores=scores.as_metrics(), held_s=run.metrics.clock.pause_s)
    run.display.say(f"step {step}, epoch {epoch + 1}: {scores.in_words(run.task.monitor[0], 'loss')}")
    return scores
