"""A user's task with what it may leave out: the full contract of `app.task.Task`, and its rules checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app.data.draws import Draws, HostDraws
from app.data.samples import Batch, Splits
from app.errors import DataError, RecipeError, SamerunError, TrainingError
from app.task import Form, Loss, NeedsData, Scores, Table, Totals
from app.tasks.own import given, repeatable
from app.tasks.own.called import Called
from app.tasks.own.samples import CompleteSamples, completed


class Complete:
    """A user's task in the full form. What else it has (count, look, leave, ...) is there as well."""

    def __init__(self, task: Any, *, name: str) -> None:
        """`name` is that of its file. Raises RecipeError for a task that lacks something, or cannot be called as it will be."""
        self._task, self._name, self._class = task, name, type(task).__name__
        given.check_task(task, file=name)
        self.monitor = given.monitor(task, file=name)
        self.unit = given.unit(task, file=name)
        self.channels_last = bool(getattr(task, "channels_last", False))
        self.neighbours = int(getattr(task, "neighbours", 1))
        self._form = Form()
        self._training: CompleteSamples | None = None
        self._calls_of_score: int | None = None
        if self._has("show"):
            self.show = self._show

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_task":
            raise AttributeError(name)
        return getattr(self._task, name)

    # Data -------------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Let the task bring its data to this machine. What it keeps of that the other processes do not see."""
        if self._has("prepare"):
            self._task.prepare()

    def samples(self, split: str) -> CompleteSamples | None:
        """Open a split, and try whether its samples are the same each time. Raises DataError if not."""
        found = self._task.samples(split)
        if found is None:
            if split == "train":
                raise DataError(f'{self._class}.samples("train") in {self._name} returned None: training needs samples')
            return None
        samples = completed(found, what=f"the {'training' if split == 'train' else split} samples of {self._name}")
        repeatable.check(samples, is_random=split == "train")
        if split == "train":
            self._training = samples
        return samples

    def notes(self, data: Splits) -> list[str]:
        """Return the task's own; none without."""
        return list(self._task.notes(data)) if self._has("notes") else []

    def matched(self, samples: Any, facts: Mapping[str, Any]) -> Any:
        """Return what the task makes of other samples; without a word of it, they must have the model's facts."""
        if self._has("matched"):
            return completed(self._task.matched(samples, facts), what=f"the samples that {self._class}.matched returned")
        ours, models = (json.dumps(dict(told), sort_keys=True) for told in (samples.facts, facts))
        if ours != models:
            raise DataError(
                f"the samples have the facts {ours}, and the model was built for {models}: give it data like "
                f"its training data, or add a method matched(self, samples, facts) to {self._name}, which "
                "returns samples that fit the model"
            )
        return samples

    # Model and loss ---------------------------------------------------------------------------------------------------

    def model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the task's network."""
        network = self._task.model(facts)
        if not isinstance(network, nn.Module):
            raise TrainingError(f"{self._class}.model returned {given.kind(network)}, but must return a torch.nn.Module")
        if next(network.parameters(), None) is None:
            raise TrainingError(
                f"{self._class}.model returned a {type(network).__name__} without parameters, so there is nothing to train"
            )
        return network

    def head(self, model: nn.Module) -> str:
        """Return the task's own; without, the last layer that has parameters itself."""
        if self._has("head"):
            return str(self._task.head(model))
        layers = model.named_modules()
        names: list[str] = [name for name, layer in layers if next(layer.parameters(recurse=False), None) is not None]
        return names[-1]

    def example(self, facts: Mapping[str, Any], form: Form) -> Batch:
        """Return the task's own; without, two training samples made ready, of which the numbers are taken away.

        Raises NeedsData where the samples are not open, or the task's `ready` needs a device.
        """
        if self._has("example"):
            return self._task.example(facts, form)  # type: ignore[no-any-return]
        if self._training is None:
            raise NeedsData
        numbers = np.array([0, len(self._training) - 1])
        fetched = self._training.fetch(numbers, HostDraws(0, numbers))
        batch: Batch = {**fetched, "samples": torch.from_numpy(numbers), "numbers": numbers}
        with _needs_data(True):
            ready = self.ready(batch, Draws(0, batch["samples"], numbers), form)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), ready)  # type: ignore[no-any-return]

    def ready(self, batch: Batch, draw: Draws | None, form: Form) -> Batch:
        """Return what the task makes of a batch on the device. Where the score is the loss, padding is left out."""
        self._form = form
        if draw is None and not self._has("score"):
            batch = _without_padding(batch)
        if not self._has("ready"):
            return batch
        ready = self._task.ready(batch, draw)
        if not isinstance(ready, Mapping):
            raise TrainingError(f"{self._class}.ready returned {given.kind(ready)}, but must return the batch, a dict")
        return {**ready, "samples": batch["samples"], "numbers": batch["numbers"]}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the task's loss, which has called the model once. Raises NeedsData if it cannot do without numbers."""
        called = Called(model, self._form, of=f"{self._class}.loss", most=1)
        with _needs_data(batch["samples"].is_meta):
            loss = given.loss(self._task.loss(called, batch), of=f"{self._class}.loss")
        called.check_called()
        return loss

    # Scores -----------------------------------------------------------------------------------------------------------

    def score(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the task's scores; without, its loss and what else that reports."""
        if not self._has("score"):
            return _as_scores(self.loss(model, batch), counts=bool((batch["numbers"] >= 0).any()))
        called = Called(model, self._form, of=f"{self._class}.score", most=None)
        scores = given.scores(self._task.score(called, batch, valid), valid, of=f"{self._class}.score")
        if self._calls_of_score not in (None, called.times):
            raise TrainingError(
                f"{self._class}.score called the model {called.times} times for this batch and "
                f"{self._calls_of_score} times for the one before: under FSDP2 and ZeRO all processes must "
                "call it equally often, also for padding"
            )
        self._calls_of_score = called.times
        return scores

    def try_score(self, model: nn.Module, batch: Batch, form: Form) -> None:
        """Score a batch before the first step: what is wrong with the task's own score would be seen after an epoch else.

        Once as it is, and once as if all of it were padding, which must not count. All ranks call it. Raises TrainingError.
        """
        if not self._has("score"):
            return
        was_training, valid = model.training, batch["samples"] >= 0
        model.eval()
        with torch.no_grad():
            ready = self.ready(batch, None, form)
            scores = self.score(model, ready, valid)
            nothing = self.score(model, ready, torch.zeros_like(valid))
        model.train(was_training)
        for name, sums in nothing.sums.items():
            if any(part.any() for part in sums[: 1 if self._has("finish") else 2]):  # NaN is not 0
                raise TrainingError(
                    f"{self._class}.score counts padding: for a batch with valid=False everywhere, the sum "
                    f"and count of {name!r} are {' and '.join(str(part.tolist()) for part in sums)}, but must "
                    "be 0. Mask out what is not valid, as in ((error * valid).sum(), valid.sum()): the "
                    "amount of padding depends on the number of processes"
                )
        if not self._has("finish"):
            self._check_monitor([name for name, (total, _) in scores.sums.items() if total.ndim == 0])

    def finish(self, totals: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:
        """Return what the task makes of the sums; without, the mean of each, and a table of those that have several."""
        if self._has("finish"):
            scores, tables = given.finished(self._task.finish(totals, rows), of=f"{self._class}.finish")
        else:
            means = {name: total / count for name, (total, count) in totals.items()}
            scores = {name: mean.item() for name, mean in means.items() if mean.ndim == 0}
            tables = {name: _table(mean) for name, mean in means.items() if mean.ndim == 1}
        self._check_monitor(list(scores))
        return scores, tables

    def _show(self, model: Callable[..., Any], batch: Batch) -> list[tuple[str, str]]:
        of = f"{self._class}.show"
        return given.texts(self._task.show(Called(model, self._form, of=of, most=None), batch), of=of)

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the task's own. Raises RecipeError without."""
        if not self._has("predict"):
            raise RecipeError(
                f"{self._name} cannot predict from a file: give {self._class} a method predict(self, model, "
                "inputs, *, top), which returns a text and a dict for each path in inputs"
            )
        return self._task.predict(model, inputs, top=top)  # type: ignore[no-any-return]

    def _check_monitor(self, names: Sequence[str]) -> None:
        if self.monitor[0] not in names:
            first = names[0] if names else "rmse"
            raise TrainingError(
                f"the monitor of {self._class} is {self.monitor!r}, but its scores are {', '.join(names) or 'none'}: set "
                f'monitor = ("{first}", "max") in {self._name}, or "min" if lower is better'
            )

    def _has(self, name: str) -> bool:
        return hasattr(self._task, name)


@contextmanager
def _needs_data(is_trial: bool) -> Iterator[None]:
    """Where the task's code is tried without data, have it say that it cannot do without. What it does wrong is raised."""
    try:
        yield
    except (SamerunError, NeedsData):
        raise
    except Exception as error:
        if is_trial:
            raise NeedsData from error
        raise


def _without_padding(batch: Batch) -> Batch:
    """Return the batch without its padding, which is at its end; one of nothing else as it is, since the model is called."""
    size = int((batch["numbers"] >= 0).sum())
    if size in (0, len(batch["numbers"])):
        return batch
    return {name: field[:size] for name, field in batch.items()}


def _as_scores(loss: Loss, *, counts: bool) -> Scores:
    """Return the loss of a batch as scores, or what is of their shapes and counts nothing."""
    mean = loss.mean.detach().double()
    count = torch.as_tensor(loss.count, device=mean.device).double()
    sums = {"loss": (torch.where(count > 0, mean * count, 0.0), count)}
    for name, later in loss.sums.items():
        total, of = later.of(*(tensor[None] for tensor in later.tensors))
        sums[name] = total[0].double(), torch.as_tensor(of, device=mean.device).double().flatten()[0]
    return Scores(sums if counts else {name: (torch.zeros_like(mean), torch.zeros_like(mean)) for name in sums})


def _table(means: Tensor) -> Table:
    return {str(at): None if mean.isnan() else mean.item() for at, mean in enumerate(means)}
