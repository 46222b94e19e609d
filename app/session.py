"""A run from its parts: opens the data, prepares the model, and writes what is left at the end.

Every step that can fail on one rank alone is agreed upon by all of them (`Runtime.together`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from app import (
    checkpoint,
    checkpoint_files,
    console,
    exported,
    flops,
    handshake,
    ledger,
    models,
    optim,
    recipe_file,
    run_folder,
    schedule,
)
from app.average import WeightAverage
from app.clock import Phase
from app.communication import Communication
from app.control import Control
from app.data import loader
from app.data.augment import Preparation
from app.data.hash64 import derive_key
from app.data.loader import Batch, Failure
from app.data.open import Data, download_data
from app.data.open import open_data as open_sources
from app.data.order import EvalBatches, TrainBatches
from app.data.source import Source
from app.errors import PresetError
from app.gauges import Gauges
from app.loop import Stopped, Training
from app.metrics import Metrics
from app.opening import Opened, Resumed
from app.predictions import predictions, write_predictions
from app.profiling.profile import Profile, check_window
from app.recipe import Recipe
from app.recipe_file import LoadedRecipe
from app.runtime import Runtime
from app.scores import Evaluation, evaluate
from app.shards import Shards, unwrapped
from app.steps import Steps
from app.trackers.pictures import Pictures


def open_data(runtime: Runtime, recipe: Recipe) -> Data:
    """Open both splits on every rank, after one process of each node has downloaded what is missing and allowed."""
    with runtime.together():
        if runtime.launched.local_rank == 0:
            download_data(recipe)
    with runtime.together():
        return open_sources(recipe)


@dataclass(frozen=True)
class Parts:
    """What all ranks agree upon before anything is written: the same model, data and length."""

    model: torch.nn.Module
    preparation: Preparation
    length: schedule.Length
    flops_per_sample: float
    """Of a forward and backward pass; counted on the main process, 0 on the others."""


def agree(runtime: Runtime, loaded: LoadedRecipe, data: Data) -> Parts:
    """Build the model on every rank, and check that recipe, data, weights and versions are the same on all."""
    recipe = loaded.recipe
    with runtime.together():
        length = schedule.length_in_steps(
            recipe.train, dataset_size=len(data.train), global_batch_size=runtime.plan.global_batch_size
        )
        check_window(recipe.profile, total_steps=length.total_steps)
        model = build_model(runtime, recipe, data.train)
        preparation = build_preparation(runtime, recipe, data.train)
    counted = 0.0
    if runtime.is_main:  # before it is divided among the ranks
        counted = flops.of_training_sample(model, channels=data.train.channels, image_size=data.train.image_size)
    handshake.check_agreement(runtime.accelerator, _facts(loaded, data, model))
    return Parts(model, preparation, length, counted)


def prepare(
    runtime: Runtime, loaded: LoadedRecipe, data: Data, parts: Parts, opened: Opened, resumed: Resumed | None
) -> Training:
    """Distribute the model as the preset says, take up a checkpoint, and return everything that the loop uses."""
    recipe, length, run_dir = loaded.recipe, parts.length, opened.folder
    first_step = resumed.step if resumed else 0
    remedy = loader.remedy(data.train, local_world_size=runtime.launched.local_world_size, device=runtime.device)
    display = console.display(total_steps=length.total_steps, is_main=runtime.is_main, remedy=remedy)
    display.say(_banner(runtime, loaded, data, length, run_dir))
    for note in models.topology_dependence(parts.model):
        display.say(f"note: {note}")

    # Weights, two moments and an average, in float32: enough to guess how long the first save takes.
    state_bytes = 16 * sum(weight.numel() for weight in parts.model.parameters())
    model, optimizer = runtime.prepare(parts.model, optim.build(recipe.optim, parts.model))
    handshake.check_prepared(runtime.accelerator, runtime.launched, model, recipe.optim.clip_norm)
    decay = recipe.train.ema_decay
    average = None if decay is None else WeightAverage(runtime.accelerator, model, optimizer, decay=decay)
    shards = Shards(runtime.accelerator, model, optimizer, average)
    facts = {"data": data.facts, "model": asdict(exported.ModelConfig.of(recipe, data.train))}
    gauges = Gauges(
        runtime.accelerator,
        Communication(model),
        flops_per_sample=parts.flops_per_sample,
        peak_flops_per_s=flops.peak_per_s(runtime.device, mixed_precision=runtime.launched.mixed_precision),
    )
    metrics = Metrics(
        runtime.accelerator,
        run_dir,
        gauges,
        opened.trackers,
        global_batch_size=runtime.plan.global_batch_size,
        log=recipe.log,
        first_step=first_step,
    )
    checkpoints = checkpoint.Checkpoints(runtime, run_dir, recipe, shards=shards, facts=facts, metrics=metrics)
    minutes = recipe.checkpoint.every_minutes
    control = Control(
        runtime,
        run_dir,
        total_steps=length.total_steps,
        state_bytes=state_bytes,
        save_every_s=None if minutes is None else 60 * minutes,
    )
    checkpoints.on_disk = control.saved
    if resumed:
        checkpoints.restore(resumed.folder)
        display.say(f"resumed from {resumed.folder}, {resumed.step} of {length.total_steps} steps done")
    steps = Steps(runtime.accelerator, model, optimizer, clip_norm=recipe.optim.clip_norm)
    window = recipe.profile.window
    profile = Profile(runtime, run_dir, metrics.clock, steps, window=window, say=display.say) if window else None
    lap = profile.lap if profile else metrics.clock.lap
    if runtime.launched.strategy == "deepspeed":
        _time_step_in_backward(model, lap)
    return Training(
        recipe=recipe,
        runtime=runtime,
        model=model,
        optimizer=optimizer,
        average=average,
        checkpoints=checkpoints,
        steps=steps,
        samples_of=functools.partial(_samples_of, recipe, len(data.train)),
        control=control,
        first_step=first_step,
        batches=_training_batches(runtime, recipe, data.train, length, first_step),
        preparation=parts.preparation,
        length=length,
        learning_rate_at=_learning_rate(recipe, length),
        seed_dropout=_dropout_seeds(recipe.seed, runtime.launched.rank, parts.model),
        evaluate=evaluation_of(runtime, model, data.test, parts.preparation),
        metrics=metrics,
        pictures=Pictures(
            opened.trackers,
            parts.preparation,
            count=recipe.log.images,
            classes=data.train.classes,
            steps_per_epoch=length.steps_per_epoch,
        ),
        lap=lap,
        profile=profile,
        display=display,
    )


def _time_step_in_backward(engine: Any, lap: Callable[[Phase], None]) -> None:
    """Count DeepSpeed's step as one, though Accelerate takes it at the end of the last backward pass."""
    take = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        lap("forward_backward")
        taken = take(*args, **kwargs)
        lap("optimizer")
        return taken

    engine.step = step


def build_model(runtime: Runtime, recipe: Recipe, source: Source) -> torch.nn.Module:
    """Return the recipe's model for these samples, on the CPU, with weights that depend on the seed alone.

    Raises PresetError for float64 weights under DeepSpeed, which steps on float32 copies of them whatever their type.
    """
    if recipe.model.dtype == "float64" and runtime.launched.strategy == "deepspeed":
        raise PresetError(
            "model.dtype is float64, and DeepSpeed keeps its weights in float32: use multi_gpu.yaml or fsdp2.yaml, or float32."
        )
    runtime.seed(recipe.seed)
    model = models.build(recipe.model, channels=source.channels, image_size=source.image_size, num_classes=len(source.classes))
    if recipe.model.sync_batchnorm:
        model = models.synchronize_batchnorm(model, device_type=runtime.device.type)
    return model


def build_preparation(runtime: Runtime, recipe: Recipe, source: Source) -> Preparation:
    """Return what turns uint8 batches of `source` into the model's inputs."""
    return Preparation(
        data=recipe.data,
        augment=recipe.augment,
        seed=recipe.seed,
        channels=source.channels,
        num_classes=len(source.classes),
        dtype=runtime.input_dtype(getattr(torch, recipe.model.dtype)),
        channels_last=recipe.model.channels_last,
    )


def evaluation_of(
    runtime: Runtime, model: torch.nn.Module, source: Source, preparation: Preparation
) -> Callable[[], Evaluation]:
    """Return the function that scores `model` on all of `source`, in micro-batches of the plan's size."""
    batches = EvalBatches(size=len(source), batch_size=runtime.plan.micro_batch * runtime.plan.world_size)
    fed = _fed(runtime, source, batches)
    return functools.partial(evaluate, runtime, model, fed, preparation, size=len(source), num_classes=len(source.classes))


def finish(training: Training, data: Data, run_dir: Path, ended: Evaluation | Stopped) -> None:
    """Write the weights and the result, or say how a run that was stopped goes on, and close the process group."""
    if training.profile is not None:
        training.profile.close()
    if isinstance(ended, Stopped):
        saved = checkpoint_files.path_of(run_dir, ended.step)
        training.display.say(
            f"stopped after step {ended.step} of {training.length.total_steps}, because {ended.request.why}\n"
            f"saved as {saved}; the same command with --resume auto and --run-dir {run_dir} goes on"
        )
        end = ledger.End(step=ended.step, outcome="stopped")
        training.control.record_outcome(ended.step, ended.request)
    else:
        _write_result(training, data, run_dir, ended)
        end = ledger.End(step=training.length.total_steps, outcome="finished")
        training.control.record_outcome(training.length.total_steps)
    if training.runtime.is_main:
        ledger.append(run_dir, end)
    training.display.close()
    training.metrics.trackers.finish()
    training.runtime.close(training.model, training.optimizer, training.batches)


def _write_result(training: Training, data: Data, run_dir: Path, scores: Evaluation) -> None:
    runtime, recipe, length = training.runtime, training.recipe, training.length
    training_s = training.metrics.clock.training_s
    with training.average.applied() if training.average else nullcontext():
        weights = whole_weights(runtime, training.model)
        if runtime.is_main:
            # Inside the block: under some strategies these are the live weights.
            exported.save(run_dir, exported.ModelConfig.of(recipe, data.train), weights)
    predicted = predictions(runtime, scores, len(data.test))
    with runtime.together():
        if runtime.is_main:
            write_predictions(run_dir, data.test, predicted)
    samples_seen = length.total_steps * runtime.plan.global_batch_size
    samples_per_s = (length.total_steps - training.first_step) * runtime.plan.global_batch_size / training_s
    if runtime.is_main:
        result = {
            "steps": length.total_steps,
            "samples_seen": samples_seen,
            **scores.as_metrics(),
            "test_samples": scores.samples,
            "test_class_accuracy": dict(zip(data.test.classes, scores.class_accuracy, strict=True)),
            "samples_per_s": samples_per_s,
            "training_s": training_s,
            "world_size": runtime.plan.world_size,
            "preset": run_folder.read_json(run_dir / run_folder.RUN)["preset"],
        }
        run_folder.write_json(run_dir / run_folder.RESULT, result)
    training.display.say(
        f"test accuracy {scores.accuracy:.4f} on {scores.samples:,} samples; {samples_per_s:,.0f} samples/s\n"
        f"run folder {run_dir}"
    )


def whole_weights(runtime: Runtime, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a prepared model, on the main process at least; all ranks call it."""
    if runtime.launched.strategy in ("deepspeed", "fsdp2"):
        gathered: dict[str, torch.Tensor] = runtime.accelerator.get_state_dict(model)
        return gathered
    return unwrapped(model).state_dict()


def _facts(loaded: LoadedRecipe, data: Data, model: torch.nn.Module) -> dict[str, str]:
    return {
        "recipe": recipe_file.digest(loaded.recipe),
        **data.facts,
        "initial weights": handshake.weights_digest(model),
        **{f"version of {package}": number for package, number in handshake.versions().items()},
    }


def _banner(runtime: Runtime, loaded: LoadedRecipe, data: Data, length: schedule.Length, run_dir: Path) -> str:
    count = runtime.plan.world_size
    where = f"{count} process{'es' if count > 1 else ''} ({runtime.launched.strategy}, {runtime.device.type})"
    return (
        f"recipe {loaded.name} on {where}, run folder {run_dir}\n"
        f"{runtime.plan}; {len(data.train):,} training samples, {length.steps_per_epoch} steps an epoch, "
        f"{length.total_steps} steps"
    )


def _learning_rate(recipe: Recipe, length: schedule.Length) -> Callable[[int], float]:
    return functools.partial(
        schedule.lr_at,
        optim=recipe.optim,
        global_batch_size=recipe.train.global_batch_size,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
    )


def _dropout_seeds(seed: int, rank: int, model: torch.nn.Module) -> Callable[[int, int], None] | None:
    """Return what seeds the generators for a forward pass, so that a resumed run draws what it would have drawn.

    Ranks draw differently, for dropout on different samples must not repeat itself. None: the model draws nothing.
    """

    def seed_pass(step: int, micro_batch: int) -> None:
        torch.manual_seed(derive_key(seed, "dropout", step, micro_batch, rank))

    return seed_pass if models.layers_with_dropout(model) else None


def _training_batches(
    runtime: Runtime, recipe: Recipe, source: Source, length: schedule.Length, first_step: int
) -> Iterable[Batch | Failure]:
    batches = TrainBatches(
        size=len(source),
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=runtime.plan.accumulation,
        first_step=first_step,
        last_step=length.total_steps,
    )
    return _fed(runtime, source, batches)


def _samples_of(recipe: Recipe, size: int, step: int) -> list[int]:
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


def _fed(runtime: Runtime, source: Source, batches: TrainBatches | EvalBatches) -> Iterable[Batch | Failure]:
    """Return this rank's shares of the global micro-batches, on its device."""
    launched, device = runtime.launched, runtime.device
    if source.decodes:
        prepared: Iterable[Batch | Failure] = runtime.prepare(
            loader.build(source, batches, local_world_size=launched.local_world_size, device=device)
        )
        return prepared
    return loader.InProcess(source, batches, rank=launched.rank, world_size=runtime.plan.world_size, device=device)
