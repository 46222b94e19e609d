"""Builds a run from its parts: what all ranks agree on, and everything that the loop uses.

Every step that can fail on one rank alone is agreed upon by all of them (`Runtime.together`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app import building, tasks
from app.attempt import Opened
from app.building import Feed, Parts
from app.checkpoints import checkpoint, optimizer_trial, stored_weights
from app.checkpoints.sharded_state import Shards, WeightAverage, check_optimizer
from app.checks import arithmetic
from app.data.mixture import Mixture
from app.data.samples import Splits, without_hold_out
from app.distributed import handshake, model_preparation, numerics, sample_dropout
from app.distributed.control import Control, Patience
from app.distributed.runtime import Runtime
from app.errors import RecipeError
from app.init import filling, model_tensors
from app.init.units import block_classes
from app.loop import Display, Training
from app.metrics import clock
from app.metrics.metrics import Metrics
from app.metrics.profile import Profile
from app.metrics.trackers import SamplePreviews
from app.optim import parameter_groups, schedule
from app.optim.steps import FirstGradients, SpikeGuard, Steps
from app.recipe import optimizers, recipe_file, task_file
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe
from app.task import Form, Loss, NeedsData, Task, overrides
from app.tasks.own import rules


def agree(runtime: Runtime, loaded: LoadedRecipe) -> Parts:
    """Open the data and build the model on every rank, and check that recipe, data, weights and versions are the same."""
    loaded = building.with_commits(runtime, loaded)
    recipe = loaded.recipe
    task, data = building.open_data(runtime, recipe)
    form = building.form_of(runtime, recipe, task)
    with runtime.together():
        _check_validation(recipe, data)
        length = schedule.length_in_steps(
            recipe.train, dataset_size=len(data.train), global_batch_size=runtime.plan.global_batch_size
        )
        model, units = building.build_model(runtime, recipe, task, data.train.facts)
        if runtime.plan.is_auto:
            model_preparation.refuse_batch_statistics(model)
        # Refuses what does not fit before a run folder exists.
        rule = parameter_groups.Rule.of(recipe.optim, model, block_classes(task, model))
        if optimizers.is_foreign(recipe.optim.name):
            rule = optimizer_trial.check(runtime, recipe, rule)
        notes = [*loaded.notes, *rule.notes(), *parameter_groups.notes_on(recipe.optim, rule)]
        dropout = sample_dropout.give_to_samples(model, recipe.seed)
        dropout.part = runtime.launched.rank % runtime.launched.context_parallel
        is_own, divides = recipe.task not in tasks.SHIPPED, units is not None and filling.can_shard(runtime)
        is_checked = is_own and rules.has_room(runtime, model, divided=divides)
        # What is checked with samples needs no look without them.
        narrow, counted = _without_data(task, model, data.train.facts, None if is_checked else dropout, count=runtime.is_main)
        dropout.refuse_others(runtime.plan, parts=runtime.launched.processes_per_rank)
        # Inside the recomputation, which then recomputes compiled code.
        notes += model_preparation.compile_blocks(runtime.accelerator, model, block_classes(task, model))
        if recipe.train.checkpoint_activations == "blocks":  # after FLOPs are counted, which must not include recomputation
            model_preparation.checkpoint_activations(model, block_classes(task, model))
        drawn = None if units is None else filling.fill(runtime, model, units)
    if narrow and (runtime.device.type, runtime.launched.mixed_precision) == ("cpu", "bf16"):
        arithmetic.check(runtime, narrow)
    weights = model_tensors.digest(model, runtime.gather)
    facts = {
        "recipe": recipe_file.digest_of_all(loaded.recipe),
        "task file": tasks.digest(recipe.task),
        **data.facts,
        "initial weights": drawn or weights,
        **{f"version of {package}": number for package, number in handshake.versions().items()},
    }
    handshake.check_agreement(runtime.gather, runtime.device, facts)
    assert drawn in (None, weights), f"drawn were {drawn}, but the ranks together hold {weights}"
    if is_checked:
        with runtime.together():
            whole, draws = model, dropout
            if model_tensors.is_sharded(model):
                whole = filling.whole_model(task, data.train.facts, seed=recipe.seed).to(getattr(torch, recipe.train.dtype))
                draws = sample_dropout.give_to_samples(whole, recipe.seed)
            rules.check(runtime, recipe, task, data.train, whole, dropout=draws, form=form)
            dropout.growing, dropout.left, dropout.drawn, dropout.remedy = draws.growing, draws.left, draws.drawn, draws.remedy
            dropout.refuse_others(runtime.plan, parts=runtime.launched.processes_per_rank)
    elif is_own:
        notes.append(
            f"whether {task_file.name_of(recipe.task)} keeps the rules of the same run is not checked, because the whole model "
            "is too large for a process: `samerun parity --quick` checks it with a smaller one"
        )
    return Parts(runtime, loaded, task, data, form, model, length, rule, dropout, counted, notes)


def _without_data(
    task: Task, model: torch.nn.Module, facts: Mapping[str, Any], dropout: sample_dropout.PassDraws | None, *, count: bool
) -> tuple[list[arithmetic.Operation], float]:
    """Return what a pass without data shows: narrow convolutions, and FLOPs per sample if these are to be counted, else 0.

    It also shows `dropout`, if given, which dimension of its inputs has the samples.
    """
    try:
        example = task.example(facts, Form(next(model.parameters()).dtype))

        def forward(called: Callable[..., Any]) -> Loss:
            return task.loss(called, example)

        size = len(example["samples"])
        if dropout:
            dropout.look(lambda times: task.loss(numerics.without_data(model), sample_dropout.repeated(example, times)))
        narrow = arithmetic.narrow_convolutions(model, forward)
        # Now, because later the model is sharded over the ranks.
        return narrow, clock.training_flops(model, forward) / size if count else 0.0
    except NeedsData:
        if dropout:
            dropout.leave_all("the task's loss needs data, so it is not known which dimension of its input has the samples")
        return [], 0.0


def prepare(parts: Parts, opened: Opened) -> Training:
    """Distribute the model as the preset defines, load a checkpoint, and return everything that the loop uses."""
    runtime, recipe, task, data, length = parts.runtime, parts.loaded.recipe, parts.task, parts.data, parts.length
    launched, resumed, claim = runtime.launched, opened.resumed, opened.claim
    first_step = resumed.step if resumed else 0
    display = _display(parts, claim.path)
    minutes, num_parameters = recipe.checkpoint.every_minutes, sum(parts.rule.sizes.values())
    control = Control(
        runtime,
        claim,
        total_steps=length.total_steps,
        # Weights, two moments and an average, in float32: enough to guess how long the first save takes.
        state_bytes=16 * num_parameters,
        save_every_s=None if minutes is None else 60 * minutes,
    )
    frozen_file = checkpoint.settle_frozen(runtime, claim, parts.model, resumed.folder if resumed else None)
    model, optimizer = filling.prepare(
        runtime, task, parts.model, parameter_groups.build_optimizer(recipe.optim, parts.model, parts.rule)
    )
    handshake.check_prepared(runtime.accelerator, launched, model, recipe.optim.clip_norm)
    metrics = Metrics(
        runtime,
        claim,
        opened.trackers,
        global_batch_size=runtime.plan.global_batch_size,
        flops_per_sample=parts.flops_per_sample,
        peak_flops_per_s=clock.peak_per_s(runtime.device, mixed_precision=launched.mixed_precision),
        log=recipe.log,
        unit=task.count_unit,
        mixture=data.train if isinstance(data.train, Mixture) else None,
        first_step=first_step,
    )
    shards = Shards(runtime.accelerator, model, optimizer, parts.rule)
    average = WeightAverage(shards, decay=recipe.train.ema_decay)
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
            "model": stored_weights.described(recipe, data.train.facts),
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
    examples = SamplePreviews(opened.trackers, task, count=count, steps_per_epoch=length.steps_per_epoch)
    gradients = FirstGradients(shards.model, runtime.together)

    def before_first() -> None:
        gradients.check()
        if report := model_preparation.compile_report():
            display.say(report)

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
            before_first=before_first,
            lap=profile.lap,
        ),
        average=average,
        feed=Feed(parts, first_step, see=examples.see, lap=profile.lap, say=display.say),
        length=length,
        learning_rate_at=functools.partial(
            schedule.lr_at,
            optim=recipe.optim,
            global_batch_size=recipe.train.global_batch_size,
            steps_per_epoch=length.steps_per_epoch,
            total_steps=length.total_steps,
        ),
        evaluations=building.evaluations(parts, model),
        patience=patience,
        metrics=metrics,
        profile=profile,
        display=display,
        checkpoints=checkpoints,
        control=control,
        first_step=first_step,
    )
    if not resumed:  # after Steps has its parameters, because FSDP2 leaves unsharded ones in the model called last
        building.try_metrics(parts, model)
    return training


def as_replay(training: Training, *, until: int) -> Training:
    """Return the training without evaluations and early stopping, which ends after step `until` and writes no weights."""
    training.control.replay_until = until
    return replace(training, evaluations={}, patience=Patience(training.task.monitor, None))


def _display(parts: Parts, run_dir: Path) -> Display:
    """Return the display, which shows what is trained, where, and the notes for the user."""
    runtime, data, length = parts.runtime, parts.data, parts.length
    launched, device = runtime.launched, runtime.device
    display = Display(total_steps=length.total_steps, is_main=runtime.is_main, unit=parts.task.count_unit)
    by_itself = device.type == "cpu" and not launched.use_cpu
    kind = f"cpu: torch {torch.__version__} finds no GPU" if by_itself else device.type
    count = launched.world_size
    scored = ", ".join(f"{len(samples):,} {split}" for split, samples in data.scored.items())
    samples = (
        f"{len(data.train):,} training samples, {length.steps_per_epoch} step{'s' * (length.steps_per_epoch > 1)} an epoch"
    )
    if isinstance(data.train, Mixture):
        samples = f"training samples of {data.train}"
    display.say(
        f"recipe {parts.loaded.name} on {count} process{'es' if count > 1 else ''} ({launched.strategy}, {kind}), "
        f"run folder {run_dir}\n"
        f"{runtime.plan}; {samples}, {length.total_steps} step{'s' * (length.total_steps > 1)}; "
        f"{f'{scored} samples' if scored else 'nothing to score the weights on'}\n"
        f"mixed_precision {launched.mixed_precision}, {runtime.numerics}"
    )
    notes = [
        *parts.task.notes(without_hold_out(data)),
        *schedule.notes_on(parts.loaded.recipe.optim, length),
        *model_preparation.topology_dependence(parts.model),
        *parts.notes,
    ]
    for note in notes:
        display.say(f"note: {note}")
    return display


def _check_validation(recipe: Recipe, data: Splits) -> None:
    """Raise RecipeError for settings that need validation scores if there are none."""
    evaluations = recipe.train.stop_after_evaluations_without_gain
    keys = ["checkpoint.keep_best=true"] if recipe.checkpoint.keep_best else []
    keys += [] if evaluations is None else [f"train.stop_after_evaluations_without_gain={evaluations}"]
    if keys and data.validation is None:
        raise RecipeError(
            f"{' and '.join(keys)} needs validation scores, and the data has no validation split: give it one, or set "
            "train.validation_fraction, for example to 0.1, which holds out training samples"
        )
