"""The training loop: the only one, and the same for every preset, device and number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoints.average import WeightAverage
from app.checkpoints.checkpoint import Checkpoints
from app.console import Display
from app.data.augment import Preparation
from app.data.loader import Batch, Failure, batches_of
from app.errors import TrainingError
from app.guard.control import Control, Request
from app.metrics.clock import Phase
from app.metrics.metrics import Metrics
from app.models import mean_loss
from app.optim.from_recipe import set_learning_rate
from app.optim.schedule import Length
from app.optim.steps import Step, Steps
from app.profiling.profile import Profile
from app.ranks.runtime import Runtime
from app.recipe.schema import Recipe
from app.scores import Evaluation
from app.trackers.pictures import Pictures


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop uses, prepared for this process."""

    recipe: Recipe
    runtime: Runtime
    model: torch.nn.Module
    optimizer: Any
    average: WeightAverage | None
    batches: Iterable[Batch | Failure]
    preparation: Preparation
    length: Length
    learning_rate_at: Callable[[int], float]
    seed_dropout: Callable[[int, int], None] | None
    """Makes the random draws of a forward pass those of a step and a micro-batch in it."""
    evaluate: Callable[[], Evaluation]
    metrics: Metrics
    pictures: Pictures
    lap: Callable[[Phase], None]
    """Ends a phase of a step."""
    profile: Profile | None
    display: Display
    checkpoints: Checkpoints
    steps: Steps
    samples_of: Callable[[int], list[int]]
    """The indices of the samples of a step, counted from 0."""
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
    metrics, profile = run.metrics, run.profile
    run.model.train()
    scores: Evaluation | None = None
    inputs: torch.Tensor | None = None
    with closing(batches_of(run.batches)) as batches:  # what fetches them ahead of time ends here
        for step in range(run.first_step, run.length.total_steps):
            if profile is not None:
                profile.begin_step(step + 1)
            set_learning_rate(run.optimizer, learning_rate := run.learning_rate_at(step))
            taken, inputs = _take_step(run, step, batches, inputs)
            if run.average is not None:
                run.average.update(taken.skipped)
            metrics.end_step(step + 1, taken)
            epoch, is_last = step // run.length.steps_per_epoch, step + 1 == run.length.total_steps
            if (step + 1) % run.recipe.log.every_steps == 0 or is_last:
                run.display.show(metrics.log(step + 1, epoch=epoch, learning_rate=learning_rate))
                _refuse_to_skip_on(run, step)
            scores = _test(run, step + 1, epoch) if is_last or _ends_evaluated_epoch(run, step) else None
            request = run.control.agreed(step + 1)
            if request.save or run.checkpoints.is_due(step + 1, is_last=is_last, scores=scores):
                run.checkpoints.save(step + 1, scores)
            if request.stop:
                run.checkpoints.finish()
                return Stopped(step + 1, request)
    run.checkpoints.finish()
    return scores or _test(run, run.first_step, (run.first_step - 1) // run.length.steps_per_epoch)


def _take_step(
    run: Training, step: int, batches: Iterator[Batch], inputs: torch.Tensor | None
) -> tuple[Step, torch.Tensor | None]:
    """Take a step over the next batches, and return its inputs, to be given to the next step as memory for its own.

    What else it needed is free when this returns.
    """
    lap = run.lap
    for micro_batch in range(run.runtime.plan.accumulation):
        run.runtime.alive(step=step)
        lap("other")
        batch = next(batches)
        lap("data_wait")
        if run.seed_dropout is not None:
            run.seed_dropout(step, micro_batch)
        with run.steps.micro_batch():
            inputs, targets = run.preparation.train(batch, inputs)
            logits = run.model(inputs)
            loss = mean_loss(logits, targets, label_smoothing=run.recipe.augment.label_smoothing)
            run.steps.backward(loss)
            lap("forward_backward")
            if run.runtime.accelerator.sync_gradients:
                taken = run.steps.take()
                lap("optimizer")
        run.metrics.add(loss, logits, targets, batch["samples"])
        run.pictures.see(step, micro_batch, inputs, targets)
    return taken, inputs


def _refuse_to_skip_on(run: Training, step: int) -> None:
    """Raise TrainingError if too many steps in a row were skipped; what was saved is on disk then."""
    most = run.recipe.train.max_skipped_steps
    if run.metrics.skipped_in_row <= most:
        return
    run.checkpoints.finish()
    samples = ", ".join(map(str, run.samples_of(step)[:8]))
    raise TrainingError(
        f"the last {run.metrics.skipped_in_row} steps up to step {step + 1} were skipped, each for a loss or gradient that is "
        f"not finite or a spike, and train.max_skipped_steps is {most} (learning rate {run.learning_rate_at(step):g}; "
        f"{run.steps.verdict}; the last batch has the samples {samples}, ...). {run.checkpoints.latest}. Lower optim.lr, "
        "lengthen the warm-up, set optim.clip_norm, raise train.max_gradient_spike, or look at these samples."
    )


def _ends_evaluated_epoch(run: Training, step: int) -> bool:
    epochs_done, rest = divmod(step + 1, run.length.steps_per_epoch)
    every = run.recipe.train.evaluate_every_epochs
    return rest == 0 and every > 0 and epochs_done % every == 0


def _test(run: Training, step: int, epoch: int) -> Evaluation:
    with run.metrics.clock.paused(), run.average.applied() if run.average else nullcontext():
        scores = run.evaluate()
    run.metrics.record_evaluation(step, epoch=epoch, scores=scores.as_metrics(), held_s=run.metrics.clock.pause_s)
    run.display.say(f"epoch {epoch}: test accuracy {scores.accuracy:.4f}, test loss {scores.loss:.4f}")
    return scores
