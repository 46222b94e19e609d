"""Builds the parts of a run: the data, opened on all ranks; the model; the batches of each rank; the evaluation.

Tools that look at a finished run build these parts in the same way.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app import tasks
from app.data import loader
from app.data.loader import Failure
from app.data.order import EvalBatches, TrainBatches
from app.data.samples import Batch, Samples, Splits, first_of, hold_out
from app.distributed import model_preparation, numerics
from app.distributed.runtime import Runtime
from app.distributed.sample_dropout import PassDraws
from app.errors import DataError, PresetError
from app.evaluation import Evaluation, evaluate
from app.init import filling
from app.init.units import Units
from app.optim import parameter_groups, schedule
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe
from app.task import Form, Task, overrides
from app.tasks.own.own_task import OwnTask

_MOST_SHOWN = 4
"""Number of samples whose texts are shown; every evaluation waits for them."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run that all ranks agree on before anything is written: the same model, data and length."""

    runtime: Runtime
    loaded: LoadedRecipe
    task: Task
    data: Splits
    form: Form
    """Type and memory format of the model's inputs."""
    model: torch.nn.Module
    length: schedule.Length
    rule: parameter_groups.Rule
    """The settings with which a step updates each parameter."""
    dropout: PassDraws
    """The random numbers of the model's layers."""
    flops_per_sample: float
    """FLOPs of a forward and backward pass per sample; counted on the main process, 0 on the others."""
    notes: list[str]
    """Notes for the user about the model."""


def open_data(runtime: Runtime, recipe: Recipe, *, to_train: bool = True) -> tuple[Task, Splits]:
    """Return the task, and its splits opened, on every rank, after one process of each node has prepared them there.

    That process downloads missing data, if allowed, and copies it to the node's disk, if the recipe asks for it. Training
    samples are held out for validation if the recipe asks for it. Without `to_train`, the training split may be missing if
    another split exists.
    """
    host, is_first = socket.gethostname(), runtime.launched.local_rank == 0
    task = tasks.of(recipe)
    with runtime.together():
        prepared = task.prepare_data() if is_first else None
    by_host = {there: found for there, found in runtime.gather((host, prepared)) if found is not None}
    task = prepared or by_host.get(host) or task
    with runtime.together():
        if to_train:
            task.check_training()
        train, problem = None, None
        try:
            train = task.samples("train")
        except DataError as error:
            if to_train:
                raise
            problem = error
        validation, test = task.samples("validation"), task.samples("test")
        if problem and validation is None and test is None:
            raise problem
        data = Splits(train, validation, test, task.data_digests())
        return task, hold_out(data, recipe.train.validation_fraction, seed=recipe.seed)


def build_model(runtime: Runtime, recipe: Recipe, task: Task, facts: Any) -> tuple[torch.nn.Module, Units | None]:
    """Return the task's model for samples with these facts, on the CPU, with weights that depend only on the seed.

    If the task has `init_module`, the model has no memory yet: `filling.fill` gives it the units' weights.

    Raises PresetError for float64 weights under DeepSpeed, which steps on float32 copies of any weights, and RecipeError for
    patterns in train.freeze that match no parameter.
    """
    launched = runtime.launched
    if recipe.train.dtype == "float64" and launched.strategy == "deepspeed":
        raise PresetError(
            "train.dtype is float64, but DeepSpeed keeps weights in float32: use multi_gpu.yaml or fsdp2.yaml, or float32."
        )
    runtime.seed(recipe.seed)
    model, units = filling.made(task, facts, seed=recipe.seed)
    filling.check(runtime, model)
    model = model.to(getattr(torch, recipe.train.dtype))
    if recipe.train.sync_batchnorm:
        model = model_preparation.synchronize_batchnorm(model, device_type=runtime.device.type)
    if runtime.device.type == "cpu" and launched.strategy != "ddp" and launched.mixed_precision != "no":
        numerics.normalize_in_float(model)
    if form_of(runtime, recipe, task).memory_format == torch.channels_last:
        numerics.take_channels_last(model)
        if launched.strategy == "ddp":
            numerics.order_small_kernels(model)
    parameter_groups.freeze(model, recipe.train.freeze or ())
    return model, units


def form_of(runtime: Runtime, recipe: Recipe, task: Task) -> Form:
    """Return dtype and memory format of the model's inputs under this preset."""
    tensor_cores = numerics.on_tensor_cores(runtime.device, mixed_precision=runtime.launched.mixed_precision)
    is_last = recipe.train.takes_channels_last(tensor_cores=tensor_cores, preferred=task.channels_last)
    dtype = runtime.input_dtype(getattr(torch, recipe.train.dtype))
    return Form(dtype, torch.channels_last if is_last else torch.contiguous_format)


def evaluation_of(
    runtime: Runtime, task: Task, model: torch.nn.Module, samples: Any, *, split: str, form: Form
) -> Callable[..., Evaluation]:
    """Return the function that scores `model` on all of `samples`, in micro-batches of the plan's size."""
    batches = EvalBatches(size=len(samples), batch_size=runtime.plan.micro_batch * runtime.plan.data_ranks)
    fed = _fed(runtime, samples, batches, seed=None)
    return functools.partial(evaluate, runtime, task, model, fed, split=split, size=len(samples), form=form)


def evaluations(parts: Parts, model: torch.nn.Module) -> dict[str, Callable[[], Evaluation]]:
    """Return the functions that score the model, by split; the first of them has the task make texts as well."""
    runtime, recipe, task = parts.runtime, parts.loaded.recipe, parts.task
    samples = {split: scored_samples(recipe, parts.data, split) for split in parts.data.scored}
    found = {split: evaluation_of(runtime, task, model, samples[split], split=split, form=parts.form) for split in samples}
    if samples and recipe.log.examples and overrides(task, "generate_samples"):
        split = next(iter(samples))
        numbers = np.arange(min(len(samples[split]), recipe.log.examples, _MOST_SHOWN))
        shown = _batch_of(runtime, samples[split], numbers)
        found[split] = functools.partial(found[split], shown=shown, seed=recipe.seed)
    return found


def try_metrics(parts: Parts, model: torch.nn.Module) -> None:
    """Let a user's task score one micro-batch, if a split will be scored. All ranks call it. Raises TrainingError."""
    task, data = parts.task, parts.data
    if isinstance(task, OwnTask) and overrides(task, "metrics") and data.scored:
        samples = scored_samples(parts.loaded.recipe, data, next(iter(data.scored)))
        numbers = np.arange(parts.runtime.plan.micro_batch)
        batch = _batch_of(parts.runtime, samples, np.where(numbers < len(samples), numbers, -1))
        task.try_metrics(model, batch, parts.form)


def _batch_of(runtime: Runtime, samples: Any, numbers: np.ndarray) -> Batch:
    """Return these samples, without anything random, on the device of this rank; -1 is padding."""
    (batch,) = loader.batches_of([loader.Fetching(samples, seed=None).__getitems__(numbers)])
    return {name: field.to(runtime.device) if isinstance(field, torch.Tensor) else field for name, field in batch.items()}


def scored_samples(recipe: Recipe, data: Splits, split: str) -> Any:
    """Return the samples of a split to score: for validation at most train.max_validation_samples."""
    most = recipe.train.max_validation_samples if split == "validation" else None
    return first_of(data.scored[split], most, seed=recipe.seed)


def training_batches(parts: Parts, first_step: int) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the micro-batches of all steps from `first_step` on, on its device."""
    recipe, samples = parts.loaded.recipe, parts.data.train
    batches = TrainBatches(
        size=len(samples),
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=parts.runtime.plan.accumulation,
        first_step=first_step,
        last_step=parts.length.total_steps,
    )
    return _fed(parts.runtime, samples, batches, seed=recipe.seed)


def _fed(
    runtime: Runtime, source: Samples, batches: TrainBatches | EvalBatches, *, seed: int | None
) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the global micro-batches, on its device; without a seed nothing is random."""
    launched, device = runtime.launched, runtime.device
    if not source.workers:
        own = loader.InProcess(source, batches, seed=seed, data_rank=launched.data_rank, data_ranks=launched.data_ranks)
        return own if device.type == "cpu" else loader.Ahead(own.unwritten, device)
    workers = loader.workers_of(runtime.workers, local_world_size=launched.local_world_size, device=device)
    dealt = runtime.deal(loader.build_loader(source, batches, seed=seed, workers=workers))
    return dealt if device.type == "cpu" else loader.Ahead(functools.partial(loader.unwritten, dealt), device)
