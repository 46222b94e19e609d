"""Checks the values of a recipe: each is in its range, and no two contradict each other. A task checks its own sections.

Standard library only, like `schema.py`, which it serves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.recipe import optimizers

if TYPE_CHECKING:
    from app.recipe.schema import Recipe, TrainRecipe


def problems_of(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe, a sentence each: the key, its value, and what it must be."""
    return [
        *out_of_range(recipe, _RANGES),
        *optimizers.problems_of(recipe.optim),
        *_contradictions(recipe),
        *_no_window(recipe),
    ]


MOST_STEPS = 10**9
"""Of a run. More are a slip of the hand: at a thousand steps a second, which hardly any run reaches, these take twelve days."""


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both among them."""

    low: float
    high: float = math.inf
    open_low: bool = False
    """Whether `low` itself is not among them."""
    open_high: bool = False
    """Whether `high` itself is not among them."""

    def holds(self, value: float) -> bool:
        """Whether the number is in the range."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        at_least = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        at_most = f"{'less than' if self.open_high else 'at most'} {self.high:{',' if self.high > 1e6 else 'g'}}"
        return at_least if math.isinf(self.high) else f"{at_least} and {at_most}"


POSITIVE, NOT_NEGATIVE, SHARE = Range(0, open_low=True), Range(0), Range(0, 1)
_RANGES = {
    "seed": Range(0, 2**63 - 1), "train.steps": Range(0, MOST_STEPS, open_low=True),
    "train.global_batch_size": POSITIVE, "train.max_micro_batch": POSITIVE,
    "train.epochs": POSITIVE, "train.evaluate_every_epochs": NOT_NEGATIVE, "train.evaluate_every_steps": POSITIVE,
    "train.validation_fraction": Range(0, 1, open_low=True, open_high=True), "train.max_validation_samples": POSITIVE,
    "train.stop_after_evaluations_without_gain": POSITIVE,
    "train.max_skipped_steps": NOT_NEGATIVE,
    "train.max_gradient_spike": Range(1, open_low=True), "train.ema_decay": Range(0, 1, open_low=True),
    "optim.lr": NOT_NEGATIVE, "optim.lr_reference_batch": POSITIVE, "optim.momentum": SHARE, "optim.betas": SHARE,
    "optim.eps": NOT_NEGATIVE, "optim.weight_decay": NOT_NEGATIVE, "optim.clip_norm": POSITIVE,
    "optim.warmup_epochs": NOT_NEGATIVE, "optim.warmup_steps": NOT_NEGATIVE, "optim.final_lr_ratio": SHARE,
    "optim.cosine_steps": POSITIVE,
    "optim.decay_epochs": POSITIVE, "optim.decay_factor": POSITIVE,
    "log.every_steps": POSITIVE, "log.examples": NOT_NEGATIVE, "checkpoint.every_steps": POSITIVE,
    "checkpoint.every_minutes": POSITIVE, "checkpoint.keep_last": Range(1),
}  # fmt: skip


def out_of_range(sections: object, ranges: Mapping[str, Range]) -> list[str]:
    """Return a sentence for each key, as `section.field`, with a number (or one of a list) that is out of its range."""
    problems = []
    for key, limits in ranges.items():
        value = sections
        for part in key.split("."):
            value = getattr(value, part)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not limits.holds(number):
                problems.append(f"{key} is {value!r}: it must be {limits}")
                break
    return problems


def _contradictions(recipe: Recipe) -> list[str]:
    train, optim = recipe.train, recipe.optim
    problems = []
    if train.epochs is not None and train.steps is not None:
        problems.append(f"train.epochs is {train.epochs} and train.steps is {train.steps}: give one of them")
    if train.evaluate_every_epochs is not None and train.evaluate_every_steps is not None:
        both = f"{train.evaluate_every_epochs} and train.evaluate_every_steps is {train.evaluate_every_steps}"
        problems.append(f"train.evaluate_every_epochs is {both}: give one of them")
    if optim.warmup_epochs is not None and optim.warmup_steps is not None:
        both = f"optim.warmup_epochs is {optim.warmup_epochs} and optim.warmup_steps is {optim.warmup_steps}"
        problems.append(f"{both}: give one of them")
    problems += _of_initial_weights(train)
    group_size, why = recipe.sections.group_size, recipe.sections.why_grouped
    if train.global_batch_size % group_size:
        problems.append(
            f"train.global_batch_size is {train.global_batch_size}: it must be a multiple of {group_size}, because {why}"
        )
    if optim.nesterov and optim.momentum == 0:
        problems.append("optim.nesterov needs optim.momentum greater than 0")
    return problems


_PUBLISHED = re.compile(r"torchvision:\w+\.\w+", re.ASCII)


def _of_initial_weights(train: TrainRecipe) -> list[str]:
    begins_with, problems = train.init_from, []
    if begins_with is None and train.init_allow is not None:
        problems.append(f"train.init_allow is {train.init_allow!r}, which needs train.init_from, and train.init_from is null")
    if begins_with is not None and begins_with.startswith("torchvision:") and not _PUBLISHED.fullmatch(begins_with):
        example = "torchvision:ResNet50_Weights.IMAGENET1K_V2"
        problems.append(f"train.init_from is {begins_with!r}: published weights have names such as {example}")
    return problems


def _no_window(recipe: Recipe) -> list[str]:
    steps, train = recipe.profile.steps, recipe.train
    try:
        window = recipe.profile.window
    except ValueError:
        return [f"profile.steps is {steps!r}: it must be the first and the last step to record, from 1 on, as in 10:20"]
    if window is not None and train.steps is not None and window[1] > train.steps:
        return [f"profile.steps is {steps!r}, and train.steps is {train.steps}: no later step can be recorded"]
    return []
