"""The training loop: the only one, and the same for every task, preset, device and number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.checkpoints.average import NoAverage, WeightAverage
from app.checkpoints.checkpoint import Checkpoints
from app.console import Display
from app.errors import TrainingError
from app.evaluation import Evaluation
from app.feed import Feed
from app.guard.control import Control, Request
from app.metrics.metrics import Metrics
from app.optim.schedule import Length
from app.optim.steps import Step, Steps
from app.profiling.profile import NoProfile, Profile
from app.ranks.runtime import Runtime
from app.recipe.schema import Recipe
from app.task import Task


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop uses, prepared for this process."""

    recipe: Recipe
    runtime: Runtime
    task: Task
    model: torch.nn.Module
    steps: Steps
    average: WeightAverage | NoAverage
    feed: Feed
    length: Length
    learning_rate_at: Callable[[int], float]
    evaluate: Callable[[], Evaluation]
    metrics: Metrics
    profile: Profile | NoProfile
    display: Display
    checkpoints: Checkpoints
    control: Control
    first_step: int
    """Steps that were taken before, in the run that this one resumes."""


@dataclass(frozen=True)
class Stopped:
    """The training has saved and left, because it was asked to."""

    step: int
    """Steps that are done, and saved."""
    request: Request


def train(run: Training) -> Evaluation | Stopped:
    """Take every step of the recipe and return the scores of the final weights on the test set, unless asked to stop."""
    scores: Evaluation | None = None
    run.model.train()
    with run.feed:
        for step in range(run.first_step, run.length.total_steps):
            run.profile.begin_step(step + 1)
            taken = _take_step(run, step)
            run.average.update(taken.skipped)
            run.metrics.end_step(step + 1, taken, run.feed.total)
            is_last = step + 1 == run.length.total_steps
            if (step + 1) % run.recipe.log.every_steps == 0 or is_last:
                _log(run, step)
            scores = _test(run, step + 1) if is_last or _ends_evaluated_epoch(run, step) else None
            request = run.control.agreed(step + 1)
            if request.save or run.checkpoints.is_due(step + 1, is_last=is_last, scores=scores):
                run.checkpoints.save(step + 1, scores)
            if request.stop:
                run.checkpoints.finish()
                return Stopped(step + 1, request)
    run.checkpoints.finish()
    return scores or _test(run, run.first_step)


def _take_step(run: Training, step: int) -> Step:
    """Take a step down the gradient of the mean loss of its global batch. What it needed is free when this returns."""
    for batch, weight in run.feed.of_step(step):
        with run.steps.micro_batch():
            loss = run.task.loss(run.model, batch)
            run.steps.backward(loss.mean, weight)
        run.metrics.add(loss, batch["samples"])
    return run.steps.take(run.learning_rate_at(step))


def _log(run: Training, step: int) -> None:
    """Write and show a line; raise TrainingError if too many steps in a row were skipped: what was saved is on disk then."""
    epoch, rate = step // run.length.steps_per_epoch, run.learning_rate_at(step)
    run.display.show(run.metrics.log(step + 1, epoch=epoch, learning_rate=rate))
    most = run.recipe.train.max_skipped_steps
    if run.metrics.skipped_in_row <= most:
        return
    run.checkpoints.finish()
    samples = ", ".join(map(str, run.feed.samples_of(step)[:8]))
    raise TrainingError(
        f"the last {run.metrics.skipped_in_row} steps up to step {step + 1} were skipped, each for a loss or gradient that is "
        f"not finite or a spike, and train.max_skipped_steps is {most} (learning rate {rate:g}; "
        f"{run.steps.verdict}; the last batch has the samples {samples}, ...). {run.checkpoints.latest}. Lower optim.lr, "
        "lengthen the warm-up, set optim.clip_norm, raise train.max_gradient_spike, or look at these samples."
    )


def _ends_evaluated_epoch(run: Training, step: int) -> bool:
    epochs_done, rest = divmod(step + 1, run.length.steps_per_epoch)
    every = run.recipe.train.evaluate_every_epochs
    return rest == 0 and every > 0 and epochs_done % every == 0


def _test(run: Training, step: int) -> Evaluation:
    """Score the weights after so many steps."""
    epoch = (step - 1) // run.length.steps_per_epoch
    with run.metrics.clock.paused(), run.average.applied():
        scores = run.evaluate()
    run.metrics.record_evaluation(step, epoch=epoch, scores=scores.as_metrics(), held_s=run.metrics.clock.pause_s)
    run.display.say(f"epoch {epoch}: {scores.in_words(run.task.monitor[0], 'loss')}")
    return scores
