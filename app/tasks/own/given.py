"""What a user's task gives: checked where it is given, and told in the words of the task's own file."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from app.errors import RecipeError, TrainingError
from app.task import SAMPLES, Later, Loss, Scores, Table

_REQUIRED = {
    "samples": (
        'samples(self, split), which returns Samples for "train", "validation" and "test", or None for a split '
        "that does not exist"
    ),
    "model": "model(self, facts), which returns a torch.nn.Module",
    "loss": "loss(self, model, batch), which returns Loss(mean, count)",
}
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "samples": ("split",),
    "model": ("facts",),
    "loss": ("model", "batch"),
    "init": ("model", "name", "unit"),
    "score": ("model", "batch", "valid"),
    "prepare": (),
    "ready": ("batch", "draw"),
    "count": ("batch",),
    "finish": ("sums", "rows"),
    "head": ("model",),
    "example": ("facts", "form"),
    "notes": ("data",),
    "matched": ("samples", "facts"),
    "look": ("batch", "most", "title"),
    "show": ("model", "batch"),
    "leave": ("folder", "samples", "rows"),
}
"""The positional arguments that each method is called with."""


def check_task(task: Any, *, file: str) -> None:
    """Raise RecipeError, with all that is wrong, for a task that lacks a method or cannot be called as it will be."""
    name = type(task).__name__
    problems = [
        f"{name} in {file} has no method {method}: add {told}"
        for method, told in _REQUIRED.items()
        if not callable(getattr(task, method, None))
    ]
    for method, arguments in _ARGUMENTS.items():
        own = getattr(task, method, None)
        if own is None or (method in _REQUIRED and not callable(own)):
            continue
        if not callable(own):
            problems.append(f"{method} of {name} in {file} is {kind(own)}, but must be a method")
        elif not _takes(own, arguments):
            wanted = ", ".join(("self", *arguments))
            problems.append(
                f"{name}.{method} in {file} is called as {method}({', '.join(arguments)}): write def {method}({wanted})"
            )
    if problems:
        raise RecipeError(*problems)


def _takes(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # written in C: it has none to look at
        return True
    return True


def monitor(task: Any, *, file: str) -> tuple[str, Literal["max", "min"]]:
    """Return the task's monitor; the loss without. Raises RecipeError if it is none."""
    own = getattr(task, "monitor", ("loss", "min"))
    if isinstance(own, (tuple, list)) and len(own) == 2 and isinstance(own[0], str) and own[1] in ("max", "min"):
        return own[0], "max" if own[1] == "max" else "min"
    raise RecipeError(
        f'monitor of {type(task).__name__} in {file} is {own!r}: give a score, and whether "min" or "max" is '
        'better, as in ("loss", "min")'
    )


def unit(task: Any, *, file: str) -> str:
    """Return the task's unit; samples without. Raises RecipeError if nothing can be called so."""
    own = getattr(task, "unit", SAMPLES)
    if isinstance(own, str) and re.fullmatch("[a-z][a-z0-9_]*", own):
        return own
    raise RecipeError(
        f"unit of {type(task).__name__} in {file} is {own!r}: give the plural of what Loss.count counts, in lower case, as in "
        '"tokens"'
    )


def loss(given: Any, *, of: str) -> Loss:
    """Return the loss as the application takes it. Raises TrainingError for what is none."""
    if not isinstance(given, Loss):
        raise TrainingError(
            f"{of} returned {kind(given)}, but must return Loss(mean, count) of app.task: the mean over the "
            "samples of the batch, and their number; or Loss.of(sum, count)"
        )
    mean, count = given.mean, given.count
    if not isinstance(mean, Tensor) or mean.ndim != 0 or not mean.is_floating_point():
        raise TrainingError(
            f"the mean of {of} is {kind(mean)}, but must be one number, a tensor without dimensions: use .mean()"
        )
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise TrainingError(
            f"the mean of {of} has no gradient: compute it from what model(...) returned, without .detach(), "
            ".item() or torch.no_grad() in between"
        )
    if type(count) is int and not given.sums:  # nothing to look at
        return given
    is_number = isinstance(count, numbers.Real) and not isinstance(count, bool)
    if not is_number and not (isinstance(count, Tensor) and count.ndim == 0):
        raise TrainingError(f"the count of {of} is {kind(count)}, but must be a number: len(...) of the batch, or a sum")
    sums = given.sums or {}
    if not isinstance(sums, Mapping):
        raise TrainingError(f"the sums of {of} are {kind(sums)}, but must be a dict of (sum, count) by name")
    named = {name: value if isinstance(value, Later) else _later(name, value, mean, of) for name, value in sums.items()}
    whole = int(count) if isinstance(count, numbers.Integral) else count
    return Loss(mean, whole, named)


def _later(name: str, pair: Any, like: Tensor, of: str) -> Later:
    total, count = _pair(name, pair, of)
    parts = (torch.as_tensor(part, device=like.device).detach() for part in (total, count))
    return Later(_as_they_are, tuple(part.double() for part in parts))


def _as_they_are(totals: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return totals, counts


def _pair(name: str, pair: Any, of: str) -> tuple[Any, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TrainingError(f"{of} returned {name!r} as {kind(pair)}, but must return (sum, count)")
    return pair[0], pair[1]


def texts(given: Any, *, of: str) -> list[tuple[str, str]]:
    """Return the titles and texts of a task's `show`. Raises TrainingError for what are none."""
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    if all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in found
    ):
        return [(title, text) for title, text in found]
    raise TrainingError(
        f'{of} returned {kind(given)}, but must return a list of titles and texts: [("a title", "a text"), ...]'
    )


def scores(given: Any, valid: Tensor, *, of: str) -> Scores:
    """Return the scores as the application takes them: float64. Raises TrainingError for what are none."""
    if not isinstance(given, Scores):
        raise TrainingError(
            f"{of} returned {kind(given)}, but must return Scores({{name: (sum, count)}}) of app.task, over the valid samples"
        )
    sums = {}
    for name, pair in given.sums.items():
        total, count = (torch.as_tensor(part, device=valid.device).detach().double() for part in _pair(name, pair, of))
        if count.shape not in ((), total.shape):
            raise TrainingError(
                f"{of} returned {name!r} with a sum {list(total.shape)} and a count {list(count.shape)}: both "
                "need the same shape, or the count ()"
            )
        sums[name] = total, count.expand(total.shape).contiguous()
    rows = given.rows
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.ndim not in (1, 2) or len(rows) != len(valid):
            raise TrainingError(
                f"the rows of {of} are {kind(rows)}, but must be a tensor [{len(valid)}, R]: R numbers for "
                "each sample, also for padding"
            )
        rows = rows.detach().double().view(len(valid), -1)
    return Scores(sums, rows)


def finished(given: Any, *, of: str) -> tuple[dict[str, float], dict[str, Table]]:
    """Return scores and tables of what a task's `finish` returned: these two, or the scores alone."""
    named, tables = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if not isinstance(named, Mapping) or not isinstance(tables, Mapping):
        raise TrainingError(
            f"{of} returned {kind(given)}, but must return a dict of scores by name, or this dict and one of tables"
        )
    try:
        return {name: float(score) for name, score in named.items()}, dict(tables)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{of} returned {named!r}, but each score must be one number ({error})") from None


def kind(value: Any) -> str:
    """Return what a value is, for a message: `a Tensor [3, 4] of float32`."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
