"""A user's task: its file, imported from the place that the recipe names, and the task as the application takes it.

`OwnTask` has defaults, checks of what the task returns, and the model that the task sees. Errors use the words of the file.
Only commands that train, evaluate, predict or export come here. Reports, the launcher and the login node read the file's keys
by `ast` (`app/recipe/task_file.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import numbers
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from app.data.draws import Draws
from app.data.mixture import Mixture
from app.data.samples import Batch, mapped
from app.distributed import numerics
from app.errors import DataError, RecipeError, SamerunError, TrainingError, noted
from app.recipe import task_file
from app.task import Form, Loss, NeedsData, Scores, Split, Table, Task, Totals, overrides, own_part, two_samples
from app.tasks.own.own_samples import OwnSamples, check_repeatable, described, shapes

_RULE = (
    "a loss must call model(...) exactly once and no submodule of it, because under FSDP2 and ZeRO their "
    "weights are sharded. Move everything that has weights, or needs several passes, into forward() of the "
    "module that model() returns"
)
_REQUIRED = ("samples(self, split)", "model(self, metadata)", "loss(self, model, batch)")
_UNCHECKED = (
    "check_training", "data_digests", "metadata_without_data", "notes", "init_module", "head", "adapters", "file_names",
    "preview", "export_files", "predict",
)  # fmt: skip
"""Methods of the user's that are called without a check of their arguments and results."""
_RUN_FILES = ("run.json", "model.json", "metrics.jsonl", "ledger.jsonl")
"""Files that mark a run folder: each is in the folder of some run that a command takes."""
_OURS = ("app", "launch", "samerun")
"""Our own packages, which are no part of a task."""


def task_of(recipe: Any) -> OwnTask:
    """Return the task of a recipe whose `task` is a file. Raises RecipeError for a file that is no task."""
    path = Path(recipe.task)
    module = _module(path)
    kind, own, read = getattr(module, task_file.TASK), getattr(module, task_file.SECTIONS, None), recipe.sections
    is_made = hasattr(kind, "loss") and not isinstance(kind, type)
    if is_made or not callable(kind):
        hint = type(kind).__name__ if is_made else "MyTask"
        raise RecipeError(f"task in {path.name} is {described(kind)}, but must be a class: write task = {hint}")
    given = []
    if own is not None:
        kinds = get_type_hints(own)
        try:
            given = [own(**{it.name: kinds[it.name](**vars(getattr(read, it.name))) for it in fields(read)})]
        except (ValueError, TypeError, AssertionError) as error:
            raise RecipeError(f"{error} (says {path.name})") from error
    takes, name = inspect.signature(kind), getattr(kind, "__name__", task_file.TASK)
    try:
        takes.bind(*given)
    except TypeError:
        words, has = ("sections", "a") if given else ("", "no")
        raise RecipeError(
            f"{name} in {path.name} takes {takes}, but is called as {name}({words}): the file has {has} class Sections. Write "
            f"def __init__(self{words and ', '}{words})"
        ) from None
    with noted(lambda _: f"{name}() in {path.name} failed"):
        return OwnTask(kind(*given), name=path.name)


def sources(task: str) -> dict[str, str]:
    """Return the text of a task file, and of the modules of its folder that were imported, by their paths in the folder.

    Modules that are imported later, such as within a function that has not run yet, are not among them.
    """
    path = Path(task)
    found = {path.name: path}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in _OURS or not file.endswith(task_file.ENDING):
            continue
        if Path(file).is_relative_to(path.parent) and "site-packages" not in Path(file).parts:
            found[str(Path(file).relative_to(path.parent))] = Path(file)
    return {name: file.read_text(encoding="utf-8", errors="replace") for name, file in sorted(found.items())}


def _module(path: Path) -> ModuleType:
    """Import the file under its own name, which is what pickles of its classes say. Its folder goes last on sys.path."""
    name, folder = path.stem, str(path.parent)
    above = (*path.absolute().parents, *path.resolve().parents)
    run = next((parent for parent in above if any((parent / name).exists() for name in _RUN_FILES)), None)
    if run is not None:
        raise RecipeError(f"task={path} is in the run folder {run}: code in a run folder is never executed. Copy it elsewhere")
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None or not Path(spec.origin).exists() or not path.samefile(spec.origin):
        found = spec.origin if spec else "no module"
        raise RecipeError(
            f"task is {path}, but Python finds {found} by the name {name!r}. Give the file another name, such as "
            f"my_{name.replace('-', '_')}.py"
        )
    try:
        with noted(lambda _: f"{path.name} could not be imported"):
            return importlib.import_module(name)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OURS or not ((path.parent / package).exists() or (path.parent / f"{package}.py").exists()):
            raise
        raise RecipeError(
            f"{path.name} imports {error.name}, but Python finds Samerun's own package {package} ({error}): give yours "
            f"another name, such as my_{package}"
        ) from error


class ModelProxy:
    """Calls the model, with floating-point inputs in the precision it wants, and counts the calls. Refuses all else."""

    def __init__(self, model: Any, form: Form, *, caller: str) -> None:
        """`caller` is the method's name (`MyTask.loss`)."""
        self._model, self._form, self._caller = model, form, caller
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        self.calls += 1
        args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "training":  # which has no weights, and is True if dropout is active
            self.refuse(f"uses model.{name}")
        return self._model.training

    def __getitem__(self, index: Any) -> Any:
        self.refuse(f"uses model[{index!r}]")

    def refuse(self, what: str) -> NoReturn:
        """Raise TrainingError for what the method does with the model."""
        raise TrainingError(f"{self._caller} {what}: {_RULE}")

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        order = self._form.memory_format
        if value.ndim == 4 and order != torch.contiguous_format:
            return value.to(dtype=self._form.dtype, memory_format=order)
        return value.to(self._form.dtype)


class OwnTask(Task):
    """Calls a user's task, and checks what it returns."""

    def __init__(self, task: Any, *, name: str) -> None:
        """`name` is its file's. Raises RecipeError for a task that lacks a method, or cannot be called as it will be."""
        self.of_user, self._name, self._class = task, name, type(task).__name__
        self.monitor = own_part(task, "monitor", Task.monitor)
        self.count_unit = own_part(task, "count_unit", Task.count_unit)
        self.group_size = int(own_part(task, "group_size", 1))
        self.channels_last = bool(own_part(task, "channels_last", False))
        self.blocks = own_part(task, "blocks")
        if problems := [*self._problems()]:
            raise RecipeError(*problems)
        for method in _UNCHECKED:
            if overrides(self, method):
                setattr(self, method, functools.partial(self._call, method))
        self._form = Form()
        self._training: OwnSamples | Mixture | None = None

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with the task's methods and attributes, a sentence each."""
        where = f"{self._class} in {self._name}"
        for method in _REQUIRED:
            if not callable(own_part(self.of_user, method.partition("(")[0])):
                yield f"{where} has no method {method}: a task needs {', '.join(_REQUIRED)}"
        for name, ours in vars(Task).items():
            method = own_part(self.of_user, name)
            if not inspect.isfunction(ours) or not callable(method):
                continue
            given = {it.name: it.kind for it in inspect.signature(ours).parameters.values() if it.name != "self"}
            if name == "preprocess":
                del given["form"]  # a user's task does not get it
            keywords = [it for it, kind in given.items() if kind is inspect.Parameter.KEYWORD_ONLY]
            positional = [it for it in given if it not in keywords]
            try:
                inspect.signature(method).bind(*positional, **dict.fromkeys(keywords))
            except TypeError:
                call = ", ".join([*positional, *(["*", *keywords] if keywords else [])])
                yield f"{self._class}.{name} in {self._name} is called as {name}({call}): write def {name}(self, {call})"
        monitor, unit = self.monitor, self.count_unit
        if not isinstance(monitor, (tuple, list)) or len(monitor) != 2 or monitor[1] not in ("max", "min"):
            yield f'monitor of {where} is {monitor!r}: give a score, and "min" or "max", as in ("loss", "min")'
        if not isinstance(unit, str) or not re.fullmatch("[a-z][a-z0-9_]*", unit):
            yield f'count_unit of {where} is {unit!r}: give the plural of what Loss.count counts, in lower case, as in "tokens"'

    def _call(self, method: str, *args: Any, **named: Any) -> Any:
        """Return what a method of the user's returns. An error that it raises gets a sentence with the method and the batch."""
        with noted(lambda error: f"{self._class}.{method} in {self._name} failed{_circumstances(error, args)}"):
            return getattr(self.of_user, method)(*args, **named)

    # Data -------------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Let the task bring its data to this machine. Other processes do not see what it keeps of that."""
        if overrides(self, "prepare_data"):
            self._call("prepare_data")

    def samples(self, split: Split) -> OwnSamples | Mixture | None:
        """Open a split, and check that its samples are the same each time. Raises DataError if not."""
        found = self._call("samples", split)
        if found is None:
            if split == "train":
                raise DataError(f'{self._class}.samples("train") in {self._name} returned None: training needs samples')
            return None
        what = f"the {'training' if split == 'train' else split} samples of {self._name}"
        samples: OwnSamples | Mixture
        if isinstance(found, Mixture):
            sources = {name: OwnSamples(it, what=f"{what}, {name},") for name, it in found.sources.items()}
            samples = replace(found, sources=sources)
            if other := next((name for name, it in sources.items() if it.facts != samples.facts), None):
                raise DataError(
                    f"{what} have the facts {samples.facts}, and {other} has {sources[other].facts}: make them equal"
                )
        else:
            samples = OwnSamples(found, what=what)
            sources = {"": samples}
        for it in sources.values():
            check_repeatable(it, is_random=split == "train")
        if split == "train":
            self._training = samples
        return samples

    def adapt_samples(self, samples: Any, metadata: Mapping[str, Any]) -> OwnSamples:
        """Return what the task makes of other samples; if it has no such method, they must have the model's metadata."""
        if overrides(self, "adapt_samples"):
            adapted = self._call("adapt_samples", _given(samples), metadata)
            return OwnSamples(adapted, what=f"the samples that {self._class}.adapt_samples returned")
        ours, models = (json.dumps(dict(found), sort_keys=True) for found in (samples.facts, metadata))
        if ours != models:
            raise DataError(
                f"the samples have the metadata {ours}, and the model was built for {models}: give it data like its training "
                f"data, or add adapt_samples(self, samples, metadata) to {self._name}, which returns samples that fit the model"
            )
        return samples  # type: ignore[no-any-return]

    # Model and loss ---------------------------------------------------------------------------------------------------

    def model(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the task's network."""
        network = self._call("model", metadata)
        if not isinstance(network, nn.Module) or next(network.parameters(), None) is None:
            raise TrainingError(f"{self._class}.model returned {described(network)}, not a torch.nn.Module with parameters")
        if lazy := [name for name, it in network.named_parameters() if isinstance(it, nn.UninitializedParameter)]:
            raise TrainingError(f"{lazy[0]} of {self._class}.model has no shape yet: give its lazy layer an input size")
        return network

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:
        """Return the task's own, or two preprocessed training samples without their data.

        Raises NeedsData where the samples are not open, or the task's `preprocess` needs a device.
        """
        if overrides(self, "example"):
            return self._call("example", metadata, form)  # type: ignore[no-any-return]
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
        ready = self._call("preprocess", batch, rng)
        if not isinstance(ready, Mapping):
            raise TrainingError(f"{self._class}.preprocess returned {described(ready)}, but must return the batch, a dict")
        return {**ready, "samples": batch["samples"], "numbers": batch["numbers"]}

    def count(self, batch: Batch) -> int | float | Tensor:
        """Return the task's count of a batch."""
        return _number(self._call("count", batch), what=f"what {self._class}.count returned")  # type: ignore[no-any-return]

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the task's loss, which has called the model once. Raises NeedsData if it cannot do without numbers."""
        of = f"{self._class}.loss"
        proxy = ModelProxy(model, self._form, caller=of)
        with _needs_data(is_trial=batch["samples"].is_meta):
            found = self._call("loss", proxy, batch)
            if not isinstance(found, Loss):
                raise TrainingError(
                    f"{of} returned {described(found)}, but must return Loss(mean, count) of samerun: the mean over the "
                    "samples of the batch, and their number; or Loss.of(sum, count)"
                )
            mean = found.mean
            is_number = isinstance(mean, Tensor) and mean.ndim == 0 and mean.is_floating_point()
            if not is_number or (torch.is_grad_enabled() and not mean.requires_grad):
                raise TrainingError(
                    f"the mean of {of} is {described(mean)}, but must be one number with a gradient: take .mean() of what "
                    "follows from model(...), without .detach(), .item() or torch.no_grad() in between"
                )
            count = len(batch["samples"]) if found.count is None else _number(found.count, what=f"the count of {of}")
            sums = {name: _pair(name, pair, of, mean.device) for name, pair in found.sums.items()}
        if proxy.calls != 1:
            proxy.refuse(f"called the model {proxy.calls} times for one batch")
        return Loss(mean, count, sums)

    # Scores -----------------------------------------------------------------------------------------------------------

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return the task's scores, or its loss and the loss's sums."""
        if not overrides(self, "metrics"):
            loss = self.loss(model, batch)
            mean = loss.mean.detach().double()
            count = torch.as_tensor(loss.count, device=mean.device).double()
            found: Any = {"loss": (torch.where(count > 0, mean * count, 0.0), count), **loss.sums}
            if not (batch["numbers"] >= 0).any():  # only padding: it counts nothing
                found = {name: (torch.zeros_like(total), torch.zeros_like(of)) for name, (total, of) in found.items()}
            return Scores(found)
        of = f"{self._class}.metrics"
        found = self._call("metrics", ModelProxy(model, self._form, caller=of), batch, valid)
        if not isinstance(found, Scores) or (found.rows is not None and len(found.rows) != len(valid)):
            raise TrainingError(
                f"{of} returned {described(found)}, but must return Scores({{name: (sum, count)}}) of samerun, over the valid "
                f"samples. Its rows, if any, are a tensor [{len(valid)}, R], also for padding"
            )
        sums = {}
        for name, pair in found.sums.items():
            total, count = _pair(name, pair, of, valid.device)
            sums[name] = total, count.expand(total.shape).contiguous()
        return Scores(sums, None if found.rows is None else found.rows.detach().double().view(len(valid), -1))

    def try_metrics(self, model: nn.Module, batch: Batch, form: Form) -> None:
        """Score a batch before the first step, instead of finding out after an epoch what is wrong with metrics or loss.

        For metrics all of it is declared padding, which must not count. All ranks call it. Raises TrainingError.
        """
        was_training = model.training
        model.eval()
        with torch.no_grad():
            ready = self.preprocess(batch, None, form=form)
            scores = self.metrics(model, ready, torch.zeros_like(batch["samples"], dtype=torch.bool))
        model.train(was_training)
        reduces = overrides(self, "reduce_metrics")
        for name, sums in scores.sums.items() if overrides(self, "metrics") else ():
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
        if overrides(self, "reduce_metrics"):
            found = self._call("reduce_metrics", sums, rows)
            named, tables = found if isinstance(found, tuple) else (found, {})
            scores = {name: float(score) for name, score in named.items()}
        else:
            scores, tables = super().reduce_metrics(sums, rows)
        self._check_monitor(list(scores))
        return scores, tables

    def _check_monitor(self, names: Sequence[str]) -> None:
        if self.monitor[0] not in names:
            first = names[0] if names else "rmse"
            raise TrainingError(
                f"the monitor of {self._class} is {self.monitor!r}, but its scores are {', '.join(names) or 'none'}: set "
                f'monitor = ("{first}", "max") in {self._name}, or "min" if lower is better'
            )

    # What people see --------------------------------------------------------------------------------------------------

    def generate_samples(self, model: Callable[..., Any], batch: Batch) -> Sequence[tuple[str, str]]:
        """Return the task's titles and texts."""
        proxy = ModelProxy(model, self._form, caller=f"{self._class}.generate_samples")
        return self._call("generate_samples", proxy, batch)  # type: ignore[no-any-return]

    def write_outputs(self, folder: Path, samples: Any, rows: Tensor) -> None:
        """Let the task write its files."""
        self._call("write_outputs", folder, _given(samples), rows)


def _circumstances(error: BaseException, args: Sequence[Any]) -> str:
    """Return the split or batch that a method was called with, and the layer of the model in which it failed."""
    kind = "a training" if torch.is_grad_enabled() else "an evaluation"
    on = [f" for {it!r}" for it in args if isinstance(it, str)]
    on += [f" on {kind} batch ({shapes(it)})" for it in args if isinstance(it, Mapping) and "samples" in it]
    model = next((it._model for it in args if isinstance(it, ModelProxy)), None)
    layer = numerics.layer_in([frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1], model)
    return "".join(on) + (f", in the layer {layer[0]}: {layer[1]}" if layer and layer[0] else "")


@contextmanager
def _needs_data(*, is_trial: bool) -> Iterator[None]:
    """Try the task's code in the block. In a trial without data raise NeedsData if the code needs some, else its own error."""
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


def _number(count: Any, *, what: str) -> Any:
    """Return a count, a number or a scalar tensor; a whole number is an int. Raises TrainingError for what is none."""
    is_number = isinstance(count, numbers.Real) and not isinstance(count, bool)
    if not is_number and not (isinstance(count, Tensor) and count.ndim == 0):
        raise TrainingError(f"{what} is {described(count)}, but must be a number: len(...) of the batch, or a sum")
    return int(count) if isinstance(count, numbers.Integral) else count


def _pair(name: str, pair: Any, of: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a sum and a count, float64. Raises TrainingError for what is no pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TrainingError(f"{of} returned {name!r} as {described(pair)}, but must return (sum, count)")
    total, count = (torch.as_tensor(part, device=device).detach().double() for part in pair)
    return total, count
