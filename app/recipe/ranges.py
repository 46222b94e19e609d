"""What the values of a recipe must be: each in its range, and no two against each other.

Standard library only, like `recipe.py`, which it serves.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.recipe import model_names

if TYPE_CHECKING:
    from app.recipe.schema import DataRecipe, Recipe


def problems_of(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe, a sentence each: the key, its value, and what it must be."""
    return [*_out_of_range(recipe), *_contradictions(recipe), *_no_window(recipe), *_no_model(recipe)]


MOST_STEPS = 10**9
"""Of a run. More are a slip of the hand: at a thousand steps a second, which hardly any run reaches, these take twelve days."""


@dataclass(frozen=True)
class _Range:
    low: float
    high: float = math.inf
    open_low: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.low if self.open_low else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        at_least = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return at_least if math.isinf(self.high) else f"{at_least} and at most {self.high:{',' if self.high > 1e6 else 'g'}}"


_POSITIVE, _NOT_NEGATIVE, _SHARE = _Range(0, open_low=True), _Range(0), _Range(0, 1)
_RANGES = {
    "seed": _Range(0, 2**63 - 1), "train.steps": _Range(0, MOST_STEPS, open_low=True),
    "data.image_size": _POSITIVE, "data.resize_size": _POSITIVE, "data.std": _POSITIVE,
    "data.fake_train_samples": _POSITIVE, "data.fake_test_samples": _POSITIVE,
    "data.fake_classes": _Range(2), "data.fake_channels": _POSITIVE,
    "augment.crop_padding": _NOT_NEGATIVE, "augment.resized_crop_min_area": _Range(0, 1, open_low=True), "augment.flip": _SHARE,
    "augment.randaugment_ops": _NOT_NEGATIVE, "augment.randaugment_magnitude": _Range(0, 10), "augment.erase": _SHARE,
    "augment.mixup": _NOT_NEGATIVE, "augment.cutmix": _NOT_NEGATIVE, "augment.label_smoothing": _SHARE,
    "model.channels": _POSITIVE, "model.hidden": _POSITIVE,
    "train.global_batch_size": _POSITIVE, "train.max_micro_batch": _POSITIVE,
    "train.epochs": _POSITIVE, "train.evaluate_every_epochs": _NOT_NEGATIVE,
    "train.max_skipped_steps": _NOT_NEGATIVE,
    "train.max_gradient_spike": _Range(1, open_low=True), "train.ema_decay": _Range(0, 1, open_low=True),
    "optim.lr": _NOT_NEGATIVE, "optim.lr_reference_batch": _POSITIVE, "optim.momentum": _SHARE, "optim.betas": _SHARE,
    "optim.eps": _NOT_NEGATIVE, "optim.weight_decay": _NOT_NEGATIVE, "optim.clip_norm": _POSITIVE,
    "optim.warmup_epochs": _NOT_NEGATIVE, "optim.warmup_steps": _NOT_NEGATIVE, "optim.final_lr_ratio": _SHARE,
    "optim.decay_epochs": _POSITIVE, "optim.decay_factor": _POSITIVE,
    "log.every_steps": _POSITIVE, "log.examples": _NOT_NEGATIVE, "checkpoint.every_steps": _POSITIVE,
    "checkpoint.every_minutes": _POSITIVE, "checkpoint.keep_last": _Range(1),
}  # fmt: skip


def _out_of_range(recipe: Recipe) -> list[str]:
    problems = []
    for key, limits in _RANGES.items():
        value: object = recipe
        for part in key.split("."):
            value = getattr(value, part)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not limits.holds(number):
                problems.append(f"{key} is {value!r}: it must be {limits}")
                break
    return problems


def _of_the_hub(data: DataRecipe) -> list[str]:
    problems = []
    if data.source != "huggingface" and (data.hub_config or data.hub_revision):
        problems.append(f"data.hub_config and data.hub_revision are for data.source=huggingface, and it is {data.source}")
    if data.hub_revision is not None and not re.fullmatch("[0-9a-f]{40}", data.hub_revision):
        problems.append(
            f"data.hub_revision is {data.hub_revision}: it must be a commit, all 40 hexadecimal digits of it, because branches "
            "and tags move (the hub shows it under Files and versions)"
        )
    return problems


def _contradictions(recipe: Recipe) -> list[str]:
    data, augment, train, optim = recipe.data, recipe.augment, recipe.train, recipe.optim
    problems = _of_the_hub(data)
    if train.epochs is not None and train.steps is not None:
        problems.append(f"train.epochs is {train.epochs} and train.steps is {train.steps}: give one of them")
    if optim.warmup_epochs is not None and optim.warmup_steps is not None:
        both = f"optim.warmup_epochs is {optim.warmup_epochs} and optim.warmup_steps is {optim.warmup_steps}"
        problems.append(f"{both}: give one of them")
    if augment.resized_crop_min_area is not None and data.image_size is None:
        problems.append("augment.resized_crop_min_area needs data.image_size: the size in pixels that crops are resized to")
    if data.resize_size is not None and data.image_size is None:
        problems.append("data.resize_size needs data.image_size: the size in pixels of the centre crop")
    if data.resize_size is not None and data.image_size is not None and data.resize_size < data.image_size:
        problems.append(f"data.resize_size is {data.resize_size}: it must be at least data.image_size, {data.image_size}")
    if data.jpeg_decoder == "reduced" and data.image_size is None:
        problems.append("data.jpeg_decoder=reduced needs data.image_size: the size in pixels that pictures are brought to")
    if augment.mixes_pairs and train.global_batch_size % 2:
        problems.append(
            f"train.global_batch_size is {train.global_batch_size}: it must be even, because mixup and cutmix mix pairs"
        )
    if len(data.mean) != len(data.std):
        problems.append(
            f"data.mean has {len(data.mean)} values and data.std {len(data.std)}: one per channel each, or one for all"
        )
    if optim.nesterov and optim.momentum == 0:
        problems.append("optim.nesterov needs optim.momentum greater than 0")
    return problems


def _no_model(recipe: Recipe) -> list[str]:
    problem = model_names.problem(recipe.model.name)
    return [problem] if problem else []


def _no_window(recipe: Recipe) -> list[str]:
    steps, train = recipe.profile.steps, recipe.train
    try:
        window = recipe.profile.window
    except ValueError:
        return [f"profile.steps is {steps!r}: it must be the first and the last step to record, from 1 on, as in 10:20"]
    if window is not None and train.steps is not None and window[1] > train.steps:
        return [f"profile.steps is {steps!r}, and train.steps is {train.steps}: no later step can be recorded"]
    return []
