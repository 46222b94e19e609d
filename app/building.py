"""Builds the parts of a run: the data, opened on all ranks; the model; the batches of each rank; the evaluation.

Tools that look at a finished run build these parts in the same way.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from app import own_layers, tasks
from app.data import held_out, loader, transfer
from app.data.loader import Failure
from app.data.order import EvalBatches, TrainBatches
from app.data.samples import Batch, Samples, Splits
from app.distributed import model_preparation, numerics
from app.distributed.runtime import Runtime
from app.errors import DataError, PresetError
from app.evaluation import Evaluation, evaluate, show
from app.init import filling
from app.init.units import Units
from app.optim import parameter_groups, schedule
from app.recipe.schema import Recipe
from app.task import Form, Task, overrides
from app.tasks.own.own_task import OwnTask

Shown = Callable[[], list[tuple[str, str]]]
_MOST_SHOWN = 4
"""Number of samples whose texts are shown; every evaluation waits for them."""


def open_data(runtime: Runtime, recipe: Recipe, *, to_train: bool = True) -> tuple[Task, Splits]:
    """Return the task, and its splits opened, on every rank, after one process of each node has prepared them there.

    That one downloads what is missing and allowed, and copies it to the node's disk, if the recipe says so. Training samples
    are held out for validation if the recipe says that. If nothing is `to_train`, there need not be any where there are others.
    """
    host, is_first = socket.gethostname(), runtime.launched.local_rank == 0
    task = tasks.of(recipe)
    with runtime.together():
        prepared = task.prepare_data() if is_first else None
    of_host = {there: found for there, found in runtime.gather((host, prepared)) if found is not None}
    task = prepared or of_host.get(host) or task
    with runtime.together():
        if to_train:
            task.check_training()
        data = _splits(task, to_train=to_train)
        return task, held_out.held_out(data, recipe.train.validation_fraction, seed=recipe.seed)


def _splits(task: Task, *, to_train: bool) -> Splits:
    train, why = None, None
    try:
        train = task.samples("train")
    except DataError as error:
        if to_train:
            raise
        why = error
    validation, test = task.samples("validation"), task.samples("test")
    if why and validation is None and test is None:
        raise why
    return Splits(train, validation, test, task.data_digests())


def build_model(runtime: Runtime, recipe: Recipe, task: Task, facts: Any) -> tuple[torch.nn.Module, Units | None]:
    """Return the task's model for samples with these facts, on the CPU, with weights that depend only on the seed.

    Of a task that has `init_module` it has no memory yet, and `filling.fill` gives it the units' weights.

    Raises PresetError for float64 weights under DeepSpeed, which steps on float32 copies of them whatever their type, and
    RecipeError if the recipe asks of the model what it has not.
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
        own_layers.normalize_in_float(model)
    if form_of(runtime, recipe, task).memory_format == torch.channels_last:
        own_layers.take_channels_last(model)
        if launched.strategy == "ddp":
            own_layers.order_small_kernels(model)
    parameter_groups.freeze(model, recipe.train.freeze or ())
    return model, units


def form_of(runtime: Runtime, recipe: Recipe, task: Task) -> Form:
    """Return dtype and memory format of the model's inputs under this preset."""
    tensor_cores = numerics.on_tensor_cores(runtime.device, mixed_precision=runtime.launched.mixed_precision)
    is_last = recipe.train.takes_channels_last(tensor_cores=tensor_cores, preferred=task.channels_last)
    dtype = runtime.input_dtype(getattr(torch, recipe.train.dtype))
    return Form(dtype, torch.channels_last if is_last else torch.contiguous_format)


def evaluation_of(
    runtime: Runtime, recipe: Recipe, task: Task, model: torch.nn.Module, samples: Any, *, split: str
) -> Callable[[], Evaluation]:
    """Return the function that scores `model` on all of `samples`, in micro-batches of the plan's size."""
    batches = EvalBatches(size=len(samples), batch_size=runtime.plan.micro_batch * runtime.plan.data_ranks)
    fed, form = _fed(runtime, samples, batches, seed=None), form_of(runtime, recipe, task)
    return functools.partial(evaluate, runtime, task, model, fed, split=split, size=len(samples), form=form)


def try_metrics(runtime: Runtime, recipe: Recipe, task: Task, model: torch.nn.Module, data: Splits) -> None:
    """Let a user's task score one micro-batch, if a split will be scored. All ranks call it. Raises TrainingError."""
    if not isinstance(task, OwnTask) or not overrides(task, "metrics") or not data.scored:
        return
    samples = scored_samples(recipe, data, next(iter(data.scored)))
    numbers = np.arange(runtime.plan.micro_batch)
    batch = _batch_of(runtime, samples, np.where(numbers < len(samples), numbers, -1))
    task.try_metrics(model, batch, form_of(runtime, recipe, task))


def texts_of(runtime: Runtime, recipe: Recipe, task: Task, model: torch.nn.Module, data: Splits) -> dict[str, Shown]:
    """Return what makes the texts that the task shows, by the split after whose evaluation: validation, or else test."""
    if not overrides(task, "generate_samples") or not data.scored or not recipe.log.examples:
        return {}
    split = next(iter(data.scored))
    samples = scored_samples(recipe, data, split)
    numbers, form = np.arange(min(len(samples), recipe.log.examples, _MOST_SHOWN)), form_of(runtime, recipe, task)

    def shown() -> list[tuple[str, str]]:
        return show(runtime, task, model, _batch_of(runtime, samples, numbers), form=form, seed=recipe.seed)

    return {split: shown}


def _batch_of(runtime: Runtime, samples: Any, numbers: np.ndarray) -> Batch:
    """Return these samples, without anything random, on the device of this rank; -1 is padding."""
    batch = loader.Fetching(samples, seed=None).__getitems__(numbers)
    if isinstance(batch, Failure):
        raise DataError(batch.text)
    return {name: field.to(runtime.device) if isinstance(field, torch.Tensor) else field for name, field in batch.items()}


def scored_samples(recipe: Recipe, data: Splits, split: str) -> Any:
    """Return the samples of a split to score: for validation at most train.max_validation_samples."""
    samples = data.scored[split]
    return (
        held_out.first_of(samples, recipe.train.max_validation_samples, seed=recipe.seed) if split == "validation" else samples
    )


def training_batches(
    runtime: Runtime, recipe: Recipe, source: Samples, length: schedule.Length, first_step: int
) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the micro-batches of all steps from `first_step` on, on its device."""
    batches = TrainBatches(
        size=len(source),
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=runtime.plan.accumulation,
        first_step=first_step,
        last_step=length.total_steps,
    )
    return _fed(runtime, source, batches, seed=recipe.seed)


def _fed(
    runtime: Runtime, source: Samples, batches: TrainBatches | EvalBatches, *, seed: int | None
) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the global micro-batches, on its device; without a seed nothing is random."""
    launched, device = runtime.launched, runtime.device
    if not source.workers:
        own = loader.InProcess(source, batches, seed=seed, data_rank=launched.data_rank, data_ranks=launched.data_ranks)
        return own if device.type == "cpu" else transfer.Ahead(own.unwritten, device)
    workers = loader.workers_of(runtime.workers, local_world_size=launched.local_world_size, device=device)
    made = loader.build(source, batches, seed=seed, workers=workers)
    dealt = runtime.deal(made)
    return dealt if device.type == "cpu" else transfer.Ahead(functools.partial(loader.unwritten, dealt), device)


def learning_rate_of(recipe: Recipe, length: schedule.Length) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, from 0."""
    return functools.partial(
        schedule.lr_at,
        optim=recipe.optim,
        global_batch_size=recipe.train.global_batch_size,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
    )
