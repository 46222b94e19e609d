"""Builds a run from its parts: what all ranks agree on, and everything that the loop uses.

Every step that can fail on one rank alone is agreed upon by all of them (`Runtime.together`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app import building, console, own_layers, tasks
from app.checkpoints import checkpoint, model_file
from app.checkpoints.shards import NoAverage, Shards, WeightAverage, check_optimizer
from app.checks import arithmetic
from app.console import Display
from app.data import held_out, loader
from app.data.samples import Splits
from app.distributed import handshake, model_preparation, sample_dropout
from app.distributed.runtime import Runtime
from app.environment import cores
from app.errors import RecipeError
from app.feed import Feed
from app.guard.control import Control
from app.guard.early_stopping import Patience
from app.init import filling, held
from app.init.units import block_classes
from app.loop import Training
from app.metrics import flops
from app.metrics.metrics import Gauges, Metrics
from app.metrics.profile import Profile, check_window
from app.metrics.trackers import Examples
from app.opening import Opened
from app.optim import parameter_groups, schedule
from app.optim.steps import FirstGradients, SpikeGuard, Steps
from app.planning import out_of_memory
from app.recipe import recipe_file, task_file
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe
from app.runs.claim import Claim
from app.task import Form, Loss, NeedsData, Task, overrides
from app.tasks.own import rules


@dataclass(frozen=True)
class Parts:
    """What all ranks agree on before anything is written: the same model, data and length."""

    model: torch.nn.Module
    length: schedule.Length
    rule: parameter_groups.Rule
    """What a step does to each parameter."""
    dropout: sample_dropout.PassDraws
    """The random numbers of the model's layers."""
    flops_per_sample: float
    """FLOPs of a forward and backward pass per sample; counted on the main process, 0 on the others."""
    notes: list[str]
    """Notes for the user about the model."""


def agree(runtime: Runtime, loaded: LoadedRecipe, task: Task, data: Splits) -> Parts:
    """Build the model on every rank, and check that recipe, data, weights and versions are the same on all."""
    recipe = loaded.recipe
    with runtime.together():
        _check_looked_at(recipe, data)
        length = schedule.length_in_steps(
            recipe.train, dataset_size=len(data.train), global_batch_size=runtime.plan.global_batch_size
        )
        check_window(recipe.profile, total_steps=length.total_steps)
        model, units = building.build_model(runtime, recipe, task, data.train.facts)
        if units is not None:  # the model has no memory yet
            out_of_memory.check(runtime, recipe, model)
        notes = filling.notes(model, units)
        rule = parameter_groups.Rule.of(recipe.optim, model)  # refuses what does not fit before a run folder exists
        dropout = sample_dropout.give_to_samples(model, recipe.seed)
        is_own, divides = recipe.task not in tasks.SHIPPED, units is not None and filling.divides(runtime)
        is_checked = is_own and rules.has_room(runtime, model, divided=divides)
        # What is checked with samples needs no look without them.
        narrow, counted = _without_data(runtime, task, model, data.train.facts, None if is_checked else dropout)
        dropout.refuse_others(runtime.plan, parts=runtime.launched.tensor_parallel)
        if recipe.train.checkpoint_activations == "blocks":  # after FLOPs are counted, which must not include recomputation
            model_preparation.compute_blocks_again(model, block_classes(task, model))
        drawn = None if units is None else filling.fill(runtime, model, units)
    if narrow and (runtime.device.type, runtime.launched.mixed_precision) == ("cpu", "bf16"):
        arithmetic.check(runtime, narrow)
    weights = held.digest(model, runtime.gather)
    handshake.check_agreement(runtime.gather, runtime.device, _facts(loaded, data, drawn or weights))
    assert drawn in (None, weights), f"drawn were {drawn}, but the ranks together hold {weights}"
    if is_own:
        with runtime.together():
            rules.check_kept(recipe, task, model)
            if is_checked:
                _check_rules(runtime, recipe, task, data, model, dropout)
                dropout.refuse_others(runtime.plan, parts=runtime.launched.tensor_parallel)
            else:
                notes.append(
                    f"whether {task_file.name_of(recipe.task)} keeps the rules of the same run is not checked, because the "
                    "whole model is too large for a process: `samerun parity --quick` checks it with a smaller one"
                )
    return Parts(model, length, rule, dropout, counted, notes)


def _without_data(
    runtime: Runtime, task: Task, model: torch.nn.Module, facts: Mapping[str, Any], dropout: sample_dropout.PassDraws | None
) -> tuple[list[arithmetic.Operation], float]:
    """Return what a pass shows without data: narrow convolutions, and on the main process FLOPs per sample; 0: not known.

    It also shows `dropout`, if given, where its inputs have the samples.
    """
    try:
        example = task.example(facts, Form(next(model.parameters()).dtype))

        def forward(called: Callable[..., Any]) -> Loss:
            return task.loss(called, example)

        size = len(example["samples"])
        if dropout:
            dropout.look(lambda times: task.loss(own_layers.without_data(model), sample_dropout.repeated(example, times)))
        narrow = arithmetic.narrow_convolutions(model, forward)
        # Now, because later the model is sharded over the ranks.
        return narrow, flops.of_training(model, forward) / size if runtime.is_main else 0.0
    except NeedsData:
        if dropout:
            dropout.leave_all("the task's loss needs data, so it is not known which dimension of its input has the samples")
        return [], 0.0


def _check_rules(
    runtime: Runtime, recipe: Recipe, task: Task, data: Splits, model: torch.nn.Module, dropout: sample_dropout.PassDraws
) -> None:
    """Raise TrainingError for a rule that the user's task breaks, and see where dropout's inputs have the samples."""
    whole, draws = model, dropout
    if held.is_divided(model):
        whole = filling.whole_model(task, data.train.facts, seed=recipe.seed).to(getattr(torch, recipe.train.dtype))
        draws = sample_dropout.give_to_samples(whole, recipe.seed)
    form = building.form_of(runtime, recipe, task)
    rules.check(runtime, recipe, task, data.train, whole, dropout=draws, form=form)
    dropout.growing, dropout.left = draws.growing, draws.left


def prepare(runtime: Runtime, loaded: LoadedRecipe, task: Task, data: Splits, parts: Parts, opened: Opened) -> Training:
    """Distribute the model as the preset says, load a checkpoint, and return everything that the loop uses."""
    recipe, length = loaded.recipe, parts.length
    resumed, claim = opened.resumed, opened.claim
    first_step = resumed.step if resumed else 0
    display = _display(runtime, loaded, task, data, parts, claim.path)
    control = _control(runtime, recipe, parts, claim)

    frozen_file = checkpoint.settle_frozen(runtime, claim, parts.model, resumed.folder if resumed else None)
    model, optimizer = filling.prepare(
        runtime, task, parts.model, parameter_groups.build_optimizer(recipe.optim, parts.model, parts.rule)
    )
    handshake.check_prepared(runtime.accelerator, runtime.launched, model, recipe.optim.clip_norm)
    decay = recipe.train.ema_decay
    average = NoAverage() if decay is None else WeightAverage(runtime.accelerator, model, optimizer, decay=decay)
    metrics = _metrics(runtime, recipe, parts, model, opened, unit=task.count_unit)
    shards = Shards(runtime.accelerator, model, optimizer, None if isinstance(average, NoAverage) else average)
    check_optimizer(runtime, parts.rule, optimizer, shards, dtype=getattr(torch, recipe.train.dtype))
    spikes = SpikeGuard(recipe.train.max_gradient_spike)
    patience = Patience(task.monitor, recipe.train.stop_after_evaluations_without_gain)
    checkpoints = checkpoint.Checkpoints(
        runtime,
        claim,
        recipe,
        shards=shards,
        facts={
            "data": data.facts,
            "model": model_file.described(recipe, data.train.facts),
            "task_sources": tasks.sources(recipe.task),
        },
        frozen=frozen_file,
        monitor=task.monitor,
        metrics=metrics,
        spikes=spikes,
        patience=patience,
        on_disk=control.saved,
    )
    if resumed:
        checkpoints.restore(resumed.folder)
        display.say(f"resumed from {resumed.folder}, {resumed.step} of {length.total_steps} steps done")
        if resumed.note:
            display.say(f"note: {resumed.note}")
    profile = Profile(runtime, claim, metrics.clock, window=recipe.profile.window, say=display.say)
    count = recipe.log.examples if overrides(task, "preview") else 0
    examples = Examples(opened.trackers, task, count=count, steps_per_epoch=length.steps_per_epoch)
    training = Training(
        recipe=recipe,
        runtime=runtime,
        task=task,
        model=model,
        steps=Steps(
            runtime.accelerator,
            model,
            optimizer,
            clip_norm=recipe.optim.clip_norm,
            spikes=spikes,
            before_backward=profile.name_backward,
            before_first=FirstGradients(shards.model, runtime.together).check,
            lap=profile.lap,
        ),
        average=average,
        feed=Feed(
            runtime,
            recipe,
            task,
            data.train,
            building.training_batches(runtime, recipe, data.train, length, first_step),
            form=building.form_of(runtime, recipe, task),
            dropout=parts.dropout,
            see=examples.see,
            lap=profile.lap,
            say=display.say,
        ),
        length=length,
        learning_rate_at=building.learning_rate_of(recipe, length),
        evaluations={
            split: building.evaluation_of(
                runtime, recipe, task, model, building.scored_samples(recipe, data, split), split=split
            )
            for split in data.scored
        },
        texts=building.texts_of(runtime, recipe, task, model, data),
        patience=patience,
        metrics=metrics,
        profile=profile,
        display=display,
        checkpoints=checkpoints,
        control=control,
        first_step=first_step,
    )
    if not resumed:  # after Steps has its parameters, because FSDP2 leaves unsharded ones in the model called last
        building.try_metrics(runtime, recipe, task, model, data)
    return training


def _display(runtime: Runtime, loaded: LoadedRecipe, task: Task, data: Splits, parts: Parts, run_dir: Path) -> Display:
    launched, unit = runtime.launched, task.count_unit
    remedy = loader.remedy(data.train, asked=runtime.workers, local_world_size=launched.local_world_size, device=runtime.device)
    display = console.display(total_steps=parts.length.total_steps, is_main=runtime.is_main, remedy=remedy, unit=unit)
    display.say(_banner(runtime, loaded, data, parts.length, run_dir))
    notes = [
        *runtime.notes,
        *task.notes(held_out.as_opened(data)),
        *schedule.notes_on(loaded.recipe.optim, parts.length),
        *model_preparation.topology_dependence(parts.model),
        *parts.notes,
    ]
    if data.validation is None:
        notes.append(
            "there is no validation split to evaluate during training: train.validation_fraction=0.1 holds "
            "out a tenth of the training samples for it"
        )
    if (runtime.device.type, runtime.launched.mixed_precision) == ("cpu", "bf16") and cores.lacks_bf16():
        notes.append("this processor has no bf16 instructions: a step can take ten times as long as with mixed_precision 'no'")
    for note in notes:
        display.say(f"note: {note}")
    return display


def _control(runtime: Runtime, recipe: Recipe, parts: Parts, claim: Claim) -> Control:
    minutes = recipe.checkpoint.every_minutes
    return Control(
        runtime,
        claim,
        total_steps=parts.length.total_steps,
        # Weights, two moments and an average, in float32: enough to guess how long the first save takes.
        state_bytes=16 * sum(parts.rule.sizes.values()),
        save_every_s=None if minutes is None else 60 * minutes,
    )


def _metrics(runtime: Runtime, recipe: Recipe, parts: Parts, model: torch.nn.Module, opened: Opened, *, unit: str) -> Metrics:
    gauges = Gauges(
        runtime,
        model,
        flops_per_sample=parts.flops_per_sample,
        peak_flops_per_s=flops.peak_per_s(runtime.device, mixed_precision=runtime.launched.mixed_precision),
    )
    return Metrics(
        runtime,
        opened.claim,
        gauges,
        opened.trackers,
        global_batch_size=runtime.plan.global_batch_size,
        log=recipe.log,
        unit=unit,
        first_step=opened.resumed.step if opened.resumed else 0,
    )


def _check_looked_at(recipe: Recipe, data: Splits) -> None:
    """Raise RecipeError for settings that need validation scores if there are none."""
    wanted = {
        "checkpoint.keep_best=true": recipe.checkpoint.keep_best,
        f"train.stop_after_evaluations_without_gain={recipe.train.stop_after_evaluations_without_gain}": (
            recipe.train.stop_after_evaluations_without_gain is not None
        ),
    }
    problems = [
        (
            f"{key} needs validation scores, and the data has no validation split: give it one, or set "
            "train.validation_fraction, for example to 0.1, which holds out training samples"
        )
        for key, is_wanted in wanted.items()
        if is_wanted and data.validation is None
    ]
    if problems:
        raise RecipeError(*problems)


def _facts(loaded: LoadedRecipe, data: Splits, weights: str) -> dict[str, str]:
    """What must be the same on all ranks; `weights` is the digest of the initial weights."""
    return {
        "recipe": recipe_file.digest_of_all(loaded.recipe),
        "task file": tasks.digest(loaded.recipe.task),
        **data.facts,
        "initial weights": weights,
        **{f"version of {package}": number for package, number in handshake.versions().items()},
    }


def _banner(runtime: Runtime, loaded: LoadedRecipe, data: Splits, length: schedule.Length, run_dir: Path) -> str:
    count = runtime.launched.world_size
    where = f"{count} process{'es' if count > 1 else ''} ({runtime.launched.strategy}, {_device(runtime)})"
    scored = ", ".join(f"{len(samples):,} {split}" for split, samples in data.scored.items())
    return (
        f"recipe {loaded.name} on {where}, run folder {run_dir}\n"
        f"{runtime.plan}; {len(data.train):,} training samples, {length.steps_per_epoch} steps an epoch, "
        f"{length.total_steps} steps; {f'{scored} samples' if scored else 'nothing to score the weights on'}\n"
        f"mixed_precision {runtime.launched.mixed_precision}, {runtime.numerics}"
    )


def _device(runtime: Runtime) -> str:
    """The kind of device, and why it is the CPU if the preset did not ask for it."""
    kind: str = runtime.device.type
    return kind if kind != "cpu" or runtime.launched.use_cpu else f"cpu: torch {torch.__version__} finds no GPU"
