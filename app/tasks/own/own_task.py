"""A user's task as the application takes it: defaults, checks of what it returns, and the model that it sees.

What is wrong is reported in the words of the task's own file.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app.data.draws import Draws
from app.data.samples import Batch, Splits, mapped
from app.errors import DataError, RecipeError, SamerunError, TrainingError
from app.task import (
    Adapters,
    Form,
    Later,
    Loss,
    NeedsData,
    Scores,
    Split,
    Table,
    Task,
    Totals,
    overrides,
    own_part,
    two_samples,
)
from app.tasks.own.own_samples import OwnSamples, check_repeatable, checked, kind

_RULE = (
    "a loss must call model(...) exactly once and no submodule of it, because under FSDP2 and ZeRO their "
    "weights are sharded. Move everything that has weights, or needs several passes, into forward() of the "
    "module that model() returns"
)


class ModelProxy:
    """Calls the model, with floating-point inputs in the precision it wants, and counts how often. Refuses all else."""

    def __init__(self, model: Any, form: Form, *, caller: str, limit: int | None = None) -> None:
        """`caller` is the method's name (`MyTask.loss`), which may call the model `limit` times; None: as often as it likes."""
        self._model, self._form, self._caller, self._limit = model, form, caller, limit
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        self.calls += 1
        if self._limit is not None and self.calls > self._limit:
            raise TrainingError(f"{self._caller} called the model a second time for one batch: {_RULE}")
        if kwargs or any(type(arg) is not Tensor for arg in args):
            args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
            return self._model(*args, **kwargs)
        return self._model(*map(self._cast, args))  # a tenth of the time

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "training":  # which has no weights, and tells whether dropout is at work
            self._refuse(f"uses model.{name}")
        return self._model.training

    def __getitem__(self, index: Any) -> Any:
        self._refuse(f"uses model[{index!r}]")

    def check_called(self) -> None:
        """Raise TrainingError if the model was not called."""
        if self.calls == 0:
            self._refuse("did not call the model")

    def _refuse(self, what: str) -> NoReturn:
        raise TrainingError(f"{self._caller} {what}: {_RULE}")

    def _cast(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **pytree.tree_map(self._cast, fields))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        order = self._form.memory_format
        if value.ndim == 4 and order != torch.contiguous_format:
            return value.to(dtype=self._form.dtype, memory_format=order)
        return value.to(self._form.dtype)


_REQUIRED = {
    "samples": (
        'samples(self, split), which returns Samples for "train", "validation" and "test", or None for a split '
        "that does not exist"
    ),
    "model": "model(self, metadata), which returns a torch.nn.Module",
    "loss": "loss(self, model, batch), which returns Loss(mean, count)",
}


class OwnTask(Task):
    """Calls a user's task, and checks what it returns."""

    def __init__(self, task: Any, *, name: str) -> None:
        """`name` is that of its file. Raises RecipeError for a task that lacks a method, or cannot be called as it will be."""
        self.of_user, self._name, self._class = task, name, type(task).__name__
        if problems := [*self._wrong_methods(), *self._wrong_attributes()]:
            raise RecipeError(*problems)
        monitor = own_part(task, "monitor", Task.monitor)
        self.monitor = monitor[0], monitor[1]
        self.count_unit = own_part(task, "count_unit", Task.count_unit)
        self.group_size = int(own_part(task, "group_size", 1))
        self.channels_last = bool(own_part(task, "channels_last", False))
        self.blocks = own_part(task, "blocks")
        self._form = Form()
        self._training: OwnSamples | None = None
        self._calls_of_metrics: int | None = None

    def _wrong_methods(self) -> Iterator[str]:
        """Yield what is wrong with the task's methods, a sentence each."""
        where = f"{self._class} in {self._name}"
        for name, needed in _REQUIRED.items():
            if not callable(own_part(self.of_user, name)):
                yield f"{where} has no method {name}: add {needed}"
        for name, ours in vars(Task).items():
            method = own_part(self.of_user, name)
            if method is None or not inspect.isfunction(ours):
                continue
            if not callable(method):
                if name not in _REQUIRED:
                    yield f"{name} of {where} is {kind(method)}, but must be a method"
                continue
            parameters = list(inspect.signature(ours).parameters.values())[1:]
            parameters = [it for it in parameters if (name, it.name) != ("preprocess", "form")]
            positional = [it.name for it in parameters if it.kind is not it.KEYWORD_ONLY]
            keywords = {it.name: None for it in parameters if it.kind is it.KEYWORD_ONLY}
            try:
                inspect.signature(method).bind(*positional, **keywords)
            except TypeError:
                call = [*positional, *(["*", *keywords] if keywords else [])]
                wanted = ", ".join(["self", *call])
                yield f"{self._class}.{name} in {self._name} is called as {name}({', '.join(call)}): write def {name}({wanted})"
            except ValueError:  # written in C: it has no signature
                pass

    def _wrong_attributes(self) -> Iterator[str]:
        where = f"{self._class} in {self._name}"
        monitor = own_part(self.of_user, "monitor", Task.monitor)
        is_pair = isinstance(monitor, (tuple, list)) and len(monitor) == 2 and isinstance(monitor[0], str)
        if not is_pair or monitor[1] not in ("max", "min"):
            yield (
                f'monitor of {where} is {monitor!r}: give a score, and whether "min" or "max" is better, as in ("loss", "min")'
            )
        unit = own_part(self.of_user, "count_unit", Task.count_unit)
        if not isinstance(unit, str) or not re.fullmatch("[a-z][a-z0-9_]*", unit):
            yield (
                f'count_unit of {where} is {unit!r}: give the plural of what Loss.count counts, in lower case, as in "tokens"'
            )

    # Data -------------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Let the task bring its data to this machine. Other processes do not see what it keeps of that."""
        if overrides(self, "prepare_data"):
            self.of_user.prepare_data()

    def check_training(self) -> None:
        """Call the task's own, if any."""
        if overrides(self, "check_training"):
            self.of_user.check_training()

    def samples(self, split: Split) -> OwnSamples | None:
        """Open a split, and check that its samples are the same each time. Raises DataError if not."""
        found = self.of_user.samples(split)
        if found is None:
            if split == "train":
                raise DataError(f'{self._class}.samples("train") in {self._name} returned None: training needs samples')
            return None
        samples = checked(found, what=f"the {'training' if split == 'train' else split} samples of {self._name}")
        check_repeatable(samples, is_random=split == "train")
        if split == "train":
            self._training = samples
        return samples

    def data_digests(self) -> Mapping[str, str]:
        """Return the task's own, or none."""
        return dict(self.of_user.data_digests()) if overrides(self, "data_digests") else {}

    def metadata_without_data(self) -> Mapping[str, Any] | None:
        """Return the task's own, or None."""
        return self.of_user.metadata_without_data() if overrides(self, "metadata_without_data") else None

    def notes(self, data: Splits) -> list[str]:
        """Return the task's own, or none."""
        if not overrides(self, "notes"):
            return []
        given = {name: _given(getattr(data, name)) for name in ("train", "validation", "test")}
        return list(self.of_user.notes(data._replace(**given)))

    def adapt_samples(self, samples: Any, metadata: Mapping[str, Any]) -> OwnSamples:
        """Return what the task makes of other samples; if it has no such method, they must have the model's metadata."""
        if overrides(self, "adapt_samples"):
            adapted = self.of_user.adapt_samples(_given(samples), metadata)
            return checked(adapted, what=f"the samples that {self._class}.adapt_samples returned")
        ours, models = (json.dumps(dict(found), sort_keys=True) for found in (samples.facts, metadata))
        if ours != models:
            raise DataError(
                f"the samples have the metadata {ours}, and the model was built for {models}: give it data like its training "
                f"data, or add a method adapt_samples(self, samples, metadata) to {self._name}, which returns samples that fit "
                "the model"
            )
        return samples  # type: ignore[no-any-return]

    # Model and loss ---------------------------------------------------------------------------------------------------

    def model(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the task's network."""
        network = self.of_user.model(metadata)
        if not isinstance(network, nn.Module):
            raise TrainingError(f"{self._class}.model returned {kind(network)}, but must return a torch.nn.Module")
        if next(network.parameters(), None) is None:
            raise TrainingError(
                f"{self._class}.model returned a {type(network).__name__} without parameters, so there is nothing to train"
            )
        return network

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Fill a unit as the task does."""
        self.of_user.init_module(model, name, module)

    def head(self, model: nn.Module) -> str:
        """Return the task's own, or the last layer that has parameters itself."""
        return str(self.of_user.head(model)) if overrides(self, "head") else super().head(model)

    def adapters(self, model: nn.Module) -> Adapters | None:
        """Return the task's own, or None."""
        return self.of_user.adapters(model) if overrides(self, "adapters") else None

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:
        """Return the task's own, or two preprocessed training samples without their data.

        Raises NeedsData where the samples are not open, or the task's `preprocess` needs a device.
        """
        if overrides(self, "example"):
            return self.of_user.example(metadata, form)  # type: ignore[no-any-return]
        if self._training is None:
            raise NeedsData
        with _needs_data(is_trial=True):
            ready = two_samples(self, self._training, form)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), ready)  # type: ignore[no-any-return]

    def preprocess(self, batch: Batch, rng: Draws | None, *, form: Form) -> Batch:
        """Return what the task makes of a batch on the device. Where the loss is the score, padding is left out."""
        self._form = form
        if rng is None and not overrides(self, "metrics"):
            size = int((batch["numbers"] >= 0).sum())  # padding is at the end
            if 0 < size < len(batch["numbers"]):  # the model is called for a batch of padding only, too
                batch = {name: field[:size] for name, field in batch.items()}
        if not overrides(self, "preprocess"):
            return batch
        ready = self.of_user.preprocess(batch, rng)
        if not isinstance(ready, Mapping):
            raise TrainingError(f"{self._class}.preprocess returned {kind(ready)}, but must return the batch, a dict")
        return {**ready, "samples": batch["samples"], "numbers": batch["numbers"]}

    def count(self, batch: Batch) -> int | float | Tensor:
        """Return the task's count of a batch."""
        return _number(self.of_user.count(batch), what=f"what {self._class}.count returned")  # type: ignore[no-any-return]

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the task's loss, which has called the model once. Raises NeedsData if it cannot do without numbers."""
        of = f"{self._class}.loss"
        proxy = ModelProxy(model, self._form, caller=of, limit=1)
        with _needs_data(is_trial=batch["samples"].is_meta):
            loss = _loss(self.of_user.loss(proxy, batch), of=of, samples=len(batch["samples"]))
        proxy.check_called()
        return loss

    # Scores -----------------------------------------------------------------------------------------------------------

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the task's scores, or its loss and the loss's sums."""
        if not overrides(self, "metrics"):
            return _as_scores(self.loss(model, batch), counts=bool((batch["numbers"] >= 0).any()))
        of = f"{self._class}.metrics"
        proxy = ModelProxy(model, self._form, caller=of)
        scores = _scores(self.of_user.metrics(proxy, batch, valid), valid, of=of)
        if self._calls_of_metrics not in (None, proxy.calls):
            raise TrainingError(
                f"{of} called the model {proxy.calls} times for this batch and {self._calls_of_metrics} times for the one "
                "before: under FSDP2 and ZeRO all processes must call it equally often, also for padding"
            )
        self._calls_of_metrics = proxy.calls
        return scores

    def try_metrics(self, model: nn.Module, batch: Batch, form: Form) -> None:
        """Score a batch before the first step, instead of finding out after an epoch what is wrong with the task's metrics.

        Once unchanged, and once as if all of it were padding, which must not count. All ranks call it. Raises TrainingError.
        """
        was_training, valid = model.training, batch["samples"] >= 0
        model.eval()
        with torch.no_grad():
            ready = self.preprocess(batch, None, form=form)
            scores = self.metrics(model, ready, valid)
            nothing = self.metrics(model, ready, torch.zeros_like(valid))
        model.train(was_training)
        reduces = overrides(self, "reduce_metrics")
        for name, sums in nothing.sums.items():
            if any(part.any() for part in sums[: 1 if reduces else 2]):  # NaN is not 0
                raise TrainingError(
                    f"{self._class}.metrics counts padding: for a batch with valid=False everywhere, the sum and count of "
                    f"{name!r} are {' and '.join(str(part.tolist()) for part in sums)}, but must be 0. Return "
                    "Scores.of({...}, valid), or mask out what is not valid, as in ((error * valid).sum(), valid.sum()): the "
                    "amount of padding depends on the number of processes"
                )
        if not reduces:
            self._check_monitor([name for name, (total, _) in scores.sums.items() if total.ndim == 0])

    def reduce_metrics(self, sums: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:
        """Return what the task makes of the sums, or the mean of each."""
        scores, tables = (
            super().reduce_metrics(sums, rows) if not overrides(self, "reduce_metrics") else self._reduced(sums, rows)
        )
        self._check_monitor(list(scores))
        return scores, tables

    def _reduced(self, sums: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:
        found, of = self.of_user.reduce_metrics(sums, rows), f"{self._class}.reduce_metrics"
        named, tables = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(named, Mapping) or not isinstance(tables, Mapping):
            raise TrainingError(
                f"{of} returned {kind(found)}, but must return a dict of scores by name, or this dict and one of tables"
            )
        try:
            return {name: float(score) for name, score in named.items()}, dict(tables)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(f"{of} returned {named!r}, but each score must be one number ({error})") from None

    def _check_monitor(self, names: Sequence[str]) -> None:
        if self.monitor[0] not in names:
            first = names[0] if names else "rmse"
            raise TrainingError(
                f"the monitor of {self._class} is {self.monitor!r}, but its scores are {', '.join(names) or 'none'}: set "
                f'monitor = ("{first}", "max") in {self._name}, or "min" if lower is better'
            )

    # What people see --------------------------------------------------------------------------------------------------

    def preview(self, batch: Batch, limit: int) -> tuple[str, Any]:
        """Return the task's picture."""
        return self.of_user.preview(batch, limit)  # type: ignore[no-any-return]

    def generate_samples(self, model: Callable[..., Any], batch: Batch) -> list[tuple[str, str]]:
        """Return the task's titles and texts."""
        of = f"{self._class}.generate_samples"
        found = self.of_user.generate_samples(ModelProxy(model, self._form, caller=of), batch)
        pairs = list(found) if isinstance(found, (list, tuple)) else [found]
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise TrainingError(
                    f'{of} returned {kind(found)}, but must return a list of titles and texts: [("a title", "a text"), ...]'
                )
        return [(title, text) for title, text in pairs]

    def write_outputs(self, folder: Path, samples: Any, rows: Tensor) -> None:
        """Let the task write its files."""
        self.of_user.write_outputs(folder, _given(samples), rows)

    def export_files(self, metadata: Mapping[str, Any], info: Mapping[str, Any]) -> Mapping[str, bytes]:
        """Return the task's files."""
        return self.of_user.export_files(metadata, info)  # type: ignore[no-any-return]

    def check_folder(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Call the task's own, if any."""
        if overrides(self, "check_folder"):
            self.of_user.check_folder(folder, metadata)

    def load_folder(self, folder: Path, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the task's network from a folder."""
        task: Any = self.of_user if overrides(self, "load_folder") else super()
        return task.load_folder(folder, metadata)  # type: ignore[no-any-return]

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the task's predictions."""
        task: Any = self.of_user if overrides(self, "predict") else super()
        return task.predict(model, inputs, top=top)  # type: ignore[no-any-return]


@contextmanager
def _needs_data(*, is_trial: bool) -> Iterator[None]:
    """Where the task's code is tried without data, raise NeedsData if it needs some. What it does wrong is raised."""
    try:
        yield
    except (SamerunError, NeedsData):
        raise
    except Exception as error:
        if is_trial:
            raise NeedsData from error
        raise


def _given(samples: Any) -> Any:
    """Return the samples as the user made them; of a part of them, that part."""
    return mapped(samples, lambda it: it.given if isinstance(it, OwnSamples) else it)


def _loss(found: Any, *, of: str, samples: int) -> Loss:
    """Return the loss as the application takes it. Raises TrainingError for what is none."""
    if not isinstance(found, Loss):
        raise TrainingError(
            f"{of} returned {kind(found)}, but must return Loss(mean, count) of samerun: the mean over the samples of the "
            "batch, and their number; or Loss.of(sum, count)"
        )
    mean = found.mean
    if not isinstance(mean, Tensor) or mean.ndim != 0 or not mean.is_floating_point():
        raise TrainingError(
            f"the mean of {of} is {kind(mean)}, but must be one number, a tensor without dimensions: use .mean()"
        )
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise TrainingError(
            f"the mean of {of} has no gradient: compute it from what model(...) returned, without .detach(), "
            ".item() or torch.no_grad() in between"
        )
    count = samples if found.count is None else _number(found.count, what=f"the count of {of}")
    sums = found.sums or {}
    if not isinstance(sums, Mapping):
        raise TrainingError(f"the sums of {of} are {kind(sums)}, but must be a dict of (sum, count) by name")
    named = {}
    for name, pair in sums.items():
        if not isinstance(pair, Later):
            parts = tuple(torch.as_tensor(part, device=mean.device).detach().double() for part in _pair(name, pair, of))
            pair = Later(_unchanged, parts)  # noqa: PLW2901
        named[name] = pair
    return Loss(mean, count, named)


def _unchanged(totals: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return totals, counts


def _number(count: Any, *, what: str) -> Any:
    """Return a count, a number or a scalar tensor; a whole number is an int. Raises TrainingError for what is none."""
    is_number = isinstance(count, numbers.Real) and not isinstance(count, bool)
    if not is_number and not (isinstance(count, Tensor) and count.ndim == 0):
        raise TrainingError(f"{what} is {kind(count)}, but must be a number: len(...) of the batch, or a sum")
    return int(count) if isinstance(count, numbers.Integral) else count


def _pair(name: str, pair: Any, of: str) -> tuple[Any, Any]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TrainingError(f"{of} returned {name!r} as {kind(pair)}, but must return (sum, count)")
    return pair[0], pair[1]


def _scores(found: Any, valid: Tensor, *, of: str) -> Scores:
    """Return the scores as the application takes them: float64. Raises TrainingError for what are none."""
    if not isinstance(found, Scores):
        raise TrainingError(
            f"{of} returned {kind(found)}, but must return Scores({{name: (sum, count)}}) of samerun, over the valid samples"
        )
    sums = {}
    for name, pair in found.sums.items():
        total, count = (torch.as_tensor(part, device=valid.device).detach().double() for part in _pair(name, pair, of))
        if count.shape not in ((), total.shape):
            raise TrainingError(
                f"{of} returned {name!r} with a sum {list(total.shape)} and a count {list(count.shape)}: both "
                "need the same shape, or the count ()"
            )
        sums[name] = total, count.expand(total.shape).contiguous()
    rows = found.rows
    if rows is not None:
        if not isinstance(rows, Tensor) or rows.ndim not in (1, 2) or len(rows) != len(valid):
            raise TrainingError(
                f"the rows of {of} are {kind(rows)}, but must be a tensor [{len(valid)}, R]: R numbers for "
                "each sample, also for padding"
            )
        rows = rows.detach().double().view(len(valid), -1)
    return Scores(sums, rows)


def _as_scores(loss: Loss, *, counts: bool) -> Scores:
    """Return the loss of a batch as scores, or zeros of their shapes, which count nothing."""
    mean = loss.mean.detach().double()
    count = torch.as_tensor(loss.count, device=mean.device).double()
    sums = {"loss": (torch.where(count > 0, mean * count, 0.0), count)}
    for name, later in loss.sums.items():
        total, of = later.of(*(tensor[None] for tensor in later.tensors))
        sums[name] = total[0].double(), torch.as_tensor(of, device=mean.device).double().flatten()[0]
    return Scores(sums if counts else {name: (torch.zeros_like(mean), torch.zeros_like(mean)) for name in sums})
