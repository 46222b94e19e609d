"""What a run is built of: data that all ranks have opened, the model, the batches each rank is fed, the evaluation.

Tools that look at a finished run build these parts in the same way.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from app import models, own_layers
from app.data import loader, transfer
from app.data.augment import Preparation
from app.data.hash64 import derive_key
from app.data.loader import Batch, Failure
from app.data.open import Data, download_data, open_staged
from app.data.order import EvalBatches, TrainBatches
from app.data.samples import Samples
from app.data.source import Source
from app.data.stage import staged
from app.errors import PresetError
from app.optim import schedule
from app.ranks import numerics
from app.ranks.runtime import Runtime
from app.recipe.schema import Recipe
from app.scores import Evaluation, evaluate
from app.tasks.image_classification import model_names


def open_data(runtime: Runtime, recipe: Recipe) -> Data:
    """Open both splits on every rank, after one process of each node has downloaded what is missing and allowed.

    That one also copies them to the node's disk, if the recipe says so, and tells the others where they are.
    """
    host, is_first, path = socket.gethostname(), runtime.launched.local_rank == 0, None
    with runtime.together():
        if is_first:
            download_data(recipe)
            path = staged(recipe).data.path
    paths = {there: found for there, was_first, found in runtime.gather((host, is_first, path)) if was_first}
    with runtime.together():
        return open_staged(recipe.with_sections(data=replace(recipe.data, path=paths[host])))


def build_model(runtime: Runtime, recipe: Recipe, source: Source) -> torch.nn.Module:
    """Return the recipe's model for these samples, on the CPU, with weights that depend on the seed alone.

    Raises PresetError for float64 weights under DeepSpeed, which steps on float32 copies of them whatever their type.
    """
    if recipe.train.dtype == "float64" and runtime.launched.strategy == "deepspeed":
        raise PresetError(
            "train.dtype is float64, and DeepSpeed keeps its weights in float32: use multi_gpu.yaml or fsdp2.yaml, or float32."
        )
    runtime.seed(recipe.seed)
    model = models.build(recipe.model, channels=source.channels, image_size=source.image_size, num_classes=len(source.classes))
    model.to(getattr(torch, recipe.train.dtype))  # drawn in float32, so that a float64 model starts at the same weights
    if recipe.train.sync_batchnorm:
        model = models.synchronize_batchnorm(model, device_type=runtime.device.type)
    if runtime.device.type == "cpu" and runtime.launched.strategy != "ddp" and runtime.launched.mixed_precision != "no":
        own_layers.normalize_in_float(model)
    if _takes_channels_last(runtime, recipe):
        own_layers.take_channels_last(model)
        if runtime.launched.strategy == "ddp":
            own_layers.order_small_kernels(model)
    return model


def build_preparation(runtime: Runtime, recipe: Recipe, source: Source) -> Preparation:
    """Return what turns uint8 batches of `source` into the model's inputs."""
    return Preparation(
        data=recipe.data,
        augment=recipe.augment,
        seed=recipe.seed,
        channels=source.channels,
        num_classes=len(source.classes),
        dtype=runtime.input_dtype(getattr(torch, recipe.train.dtype)),
        channels_last=_takes_channels_last(runtime, recipe),
    )


def _takes_channels_last(runtime: Runtime, recipe: Recipe) -> bool:
    tensor_cores = numerics.on_tensor_cores(runtime.device, mixed_precision=runtime.launched.mixed_precision)
    is_convnet = recipe.model.name == model_names.CONVNET
    return recipe.train.takes_channels_last(tensor_cores=tensor_cores, is_convnet=is_convnet)


def evaluation_of(
    runtime: Runtime,
    model: torch.nn.Module,
    source: Source,
    preparation: Preparation,
) -> Callable[[], Evaluation]:
    """Return the function that scores `model` on all of `source`, in micro-batches of the plan's size."""
    batches = EvalBatches(size=len(source), batch_size=runtime.plan.micro_batch * runtime.plan.world_size)
    fed = _fed(runtime, source, batches, seed=None)
    return functools.partial(evaluate, runtime, model, fed, preparation, size=len(source), num_classes=len(source.classes))


def training_batches(
    runtime: Runtime, recipe: Recipe, source: Source, length: schedule.Length, first_step: int
) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the micro-batches of all steps after the first so many, on its device."""
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
        own = loader.InProcess(source, batches, seed=seed, rank=launched.rank, world_size=runtime.plan.world_size)
        return own if device.type == "cpu" else transfer.Ahead(own.unwritten, device)
    made = loader.build(source, batches, seed=seed, local_world_size=launched.local_world_size, device=device)
    dealt = runtime.deal(made)
    return dealt if device.type == "cpu" else transfer.Ahead(functools.partial(loader.unwritten, dealt), device)


def samples_of(recipe: Recipe, size: int, step: int) -> list[int]:
    """Return the indices of the samples of a step (from 0), of `size` training samples."""
    batches = TrainBatches(
        size=size,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=1,
        first_step=step,
        last_step=step + 1,
    )
    indices: list[int] = (next(iter(batches)) % size).tolist()
    return indices


def learning_rate_of(recipe: Recipe, length: schedule.Length) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, from 0."""
    return functools.partial(
        schedule.lr_at,
        optim=recipe.optim,
        global_batch_size=recipe.train.global_batch_size,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
    )


def dropout_seeds(seed: int, rank: int, model: torch.nn.Module) -> Callable[[int, int], None] | None:
    """Return what seeds the generators for a forward pass, so that a resumed run draws what it would have drawn.

    Ranks draw differently, for dropout on different samples must not repeat itself. None: the model draws nothing.
    """

    def seed_pass(step: int, micro_batch: int) -> None:
        torch.manual_seed(derive_key(seed, "dropout", step, micro_batch, rank))

    return seed_pass if models.layers_with_dropout(model) else None
