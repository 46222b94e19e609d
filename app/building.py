"""Builds the parts of a run: the data, opened on all ranks; the model; the batches of each step; the evaluation.

Tools that look at a finished run build these parts in the same way.
"""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from app import tasks
from app.data import loader
from app.data.draws import Draws
from app.data.loader import batches_of
from app.data.mixture import Mixture
from app.data.order import EvalBatches, TrainBatches, derive_key
from app.data.samples import Batch, Samples, Splits, first_of, hold_out
from app.distributed import model_preparation, numerics
from app.distributed.runtime import Runtime
from app.distributed.sample_dropout import PassDraws
from app.environment import host
from app.errors import DataError, PresetError, RecipeError, TrainingError, noted
from app.evaluation import Evaluation, evaluate
from app.files import hub
from app.init import filling
from app.init.units import Units
from app.metrics.clock import Phase
from app.optim import parameter_groups, schedule
from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import Recipe, problems_of_mixture
from app.task import Form, Task, overrides, own_part
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


def with_commits(runtime: Runtime, loaded: LoadedRecipe) -> LoadedRecipe:
    """Return the recipe with the commits of its models of the hub, which the main process asks for. Raises DataError."""
    recipe = loaded.recipe
    places = recipe_file.hub_places(recipe)
    with runtime.together():  # each place once, because a branch can move between two questions
        keys = {place: key for key, place in places.items() if runtime.is_main}
        found = {place: hub.resolved(key, place, download=recipe.train.download) for place, key in keys.items()}
    found = runtime.from_main(found)
    places = {key: found.get(place, place) for key, place in places.items()}
    return replace(loaded, recipe=recipe_file.with_places(recipe, places))


def open_data(runtime: Runtime, recipe: Recipe, *, to_train: bool = True) -> tuple[Task, Splits]:
    """Return the task, and its splits opened, on every rank, after one process of each node has prepared them there.

    That process downloads missing data, if allowed, and copies it to the node's disk, if the recipe asks for it. Training
    samples are held out for validation if the recipe asks for it. Without `to_train`, the training split may be missing if
    another split exists.
    """
    here, is_first = socket.gethostname(), runtime.launched.local_rank == 0
    task = tasks.of(recipe)
    with runtime.together():
        places = recipe_file.hub_places(recipe) if is_first else {}
        places.pop("train.init_from", None)  # a resumed run does not read it
        for key, place in places.items():
            hub.folder(key, place, weights=False, download=recipe.train.download)
        prepared = task.prepare_data() if is_first else None
    by_host = {there: found for there, found in runtime.gather((here, prepared)) if found is not None}
    task = prepared or by_host.get(here) or task
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
        data = hold_out(data, recipe.train.validation_fraction, seed=recipe.seed)
        if to_train and isinstance(data.train, Mixture):
            data = data._replace(train=_ordered(data.train, recipe))
        return task, data


def _ordered(mixture: Mixture, recipe: Recipe) -> Mixture:
    """Return the samples of the run. Raises RecipeError for keys that count epochs."""
    if problems := [*problems_of_mixture(recipe)]:
        raise RecipeError(*problems)
    assert recipe.train.steps is not None
    return mixture.ordered(seed=recipe.seed, global_batch_size=recipe.train.global_batch_size, steps=recipe.train.steps)


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
    fed = _rank_batches(runtime, samples, batches, seed=None)
    scoring = noted(lambda _: f"The {split} samples were being scored")
    return scoring(functools.partial(evaluate, runtime, task, model, fed, split=split, size=len(samples), form=form))


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
    if isinstance(task, OwnTask) and data.scored:
        samples = scored_samples(parts.loaded.recipe, data, next(iter(data.scored)))
        numbers = np.arange(parts.runtime.plan.micro_batch)
        batch = _batch_of(parts.runtime, samples, np.where(numbers < len(samples), numbers, -1))
        task.try_metrics(model, batch, parts.form)


def _batch_of(runtime: Runtime, samples: Any, numbers: np.ndarray) -> Batch:
    """Return these samples, without anything random, on the device of this rank; -1 is padding."""
    (batch,) = batches_of([loader.Fetching(samples, seed=None).__getitems__(numbers)])
    return {name: field.to(runtime.device) if isinstance(field, torch.Tensor) else field for name, field in batch.items()}


def scored_samples(recipe: Recipe, data: Splits, split: str) -> Any:
    """Return the samples of a split to score: for validation at most train.max_validation_samples."""
    most = recipe.train.max_validation_samples if split == "validation" else None
    return first_of(data.scored[split], most, seed=recipe.seed)


def _rank_batches(
    runtime: Runtime, source: Samples, batches: TrainBatches | EvalBatches, *, seed: int | None
) -> Iterable[Batch | DataError]:
    """Return this rank's shares of the global micro-batches, on its device; without a seed nothing is random."""
    launched, device = runtime.launched, runtime.device
    fed: Iterable[Batch | DataError]
    if source.workers:
        workers = loader.num_workers(runtime.workers, host.usable(launched.local_world_size), device)
        fed = runtime.deal(loader.build_loader(source, batches, seed=seed, workers=workers))
    else:
        together = loader.TOGETHER_BYTES if source.is_array and device.type != "cpu" else 0
        ranks = launched.data_rank, launched.data_ranks
        fed = loader.InProcess(source, batches, seed, *ranks, together_bytes=together)
    return fed if device.type == "cpu" else loader.Ahead(fed, device)


class Feed:
    """Feeds this rank with its passes over a run's global batches, from one step on."""

    def __init__(
        self,
        parts: Parts,
        first_step: int,
        *,
        see: Callable[[int, int, Batch], None],
        lap: Callable[[Phase], None],
        say: Callable[[str], None],
    ) -> None:
        """`see` gets each batch, with its step and its number in it; `lap` ends a phase of a step, and `say` shows a line."""
        self._runtime, self._recipe, self._task, self._form = parts.runtime, parts.loaded.recipe, parts.task, parts.form
        self._samples, self._dropout = parts.data.train, parts.dropout
        steps = first_step, parts.length.total_steps
        order = _train_batches(self._recipe, self._samples, *steps, micro_batches=self._runtime.plan.accumulation)
        self._global_batches = iter(replace(order, micro_batches_per_step=1))  # permuted many steps at a time
        self._samples_count, self._task_counts = own_part(self._samples, "count"), overrides(self._task, "count")
        self.batches = _rank_batches(self._runtime, self._samples, order, seed=self._recipe.seed)
        """This rank's shares of the micro-batches; what fetches them is released with the model."""
        self._see, self._lap, self._say = see, lap, say
        self._draws_by_rank: bool | None = None
        """True if passes draw from torch's generators; None: not known yet."""
        self._fetched = batches_of(self.batches)
        self.total: float | torch.Tensor = float(parts.runtime.plan.global_batch_size)
        """Sum of the `Loss.count` of all passes of the last step, on all ranks; a tensor is a scalar."""

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        """End what fetches batches ahead of time."""
        with closing(self._fetched):
            self._dropout.end()

    def passes(self, step: int) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the batches of a step (from 0) with their weights, whose mean over all ranks and passes is 1 / passes."""
        weighed = self.weighed(step)
        return weighed if self._draws_by_rank is False and not self._dropout.layers else self._begun(step, weighed)

    def samples_of(self, step: int) -> list[int]:
        """Return the indices of the samples of a step (from 0)."""
        batches = _train_batches(self._recipe, self._samples, step, step + 1, micro_batches=1)
        return (next(iter(batches)) % len(self._samples)).tolist()  # type: ignore[no-any-return]

    def not_finite(self, step: int) -> str:
        """Return a sentence on a sample of a step (from 0) that is not finite, fetched as in an evaluation; empty: all are."""
        for index in self.samples_of(step):
            for name, field in self._samples.fetch(np.array([index]), None).items():
                if isinstance(field, torch.Tensor) and field.is_floating_point() and not field.isfinite().all():
                    return f"Field {name!r} of training sample {index} is not finite: correct the data"
        return ""

    def _next(self, step: int, number: int) -> Batch:
        self._runtime.alive(step=step)
        self._lap("other")
        batch = next(self._fetched)
        self._lap("data_wait")
        draw = Draws(self._recipe.seed, batch["samples"], batch["numbers"])
        ready = self._task.preprocess(batch, draw, form=self._form)
        self._see(step, number, ready)
        return ready

    def weighed(self, step: int) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Return the batches of a step (from 0) with their weights, without random numbers for passes.

        The weights are count * ranks / total: averaged over ranks, they add up to the mean of the global batch.
        """
        runtime = self._runtime
        passes = map(self._next, itertools.repeat(step), range(runtime.plan.accumulation))
        ranks = runtime.plan.data_ranks
        if self._samples_count is not None:  # known beforehand, on the host
            each = np.asarray(self._samples_count(next(self._global_batches) % len(self._samples)))
            self.total = float(each.sum())
            own = each.reshape(runtime.plan.accumulation, ranks, -1)[:, runtime.launched.data_rank].sum(1)
            return zip(passes, (own * ranks / max(self.total, 1.0)).tolist(), strict=True)
        if self._task_counts:  # known when all batches are in memory
            batches = list(passes)
            counts = [torch.as_tensor(self._task.count(it), dtype=torch.float64, device=runtime.device) for it in batches]
            self.total = in_all = runtime.reduce(torch.stack(counts).sum())
            return zip(batches, [count * ranks / in_all.clamp(min=1) for count in counts], strict=True)
        return zip(passes, itertools.repeat(1 / runtime.plan.accumulation), strict=False)

    def _begun(
        self, step: int, passes: Iterator[tuple[Batch, float | torch.Tensor]]
    ) -> Iterator[tuple[Batch, float | torch.Tensor]]:
        """Give dropout the samples of each pass, and seed torch's generators for all other random numbers.

        They are seeded for each pass, so that a resumed run draws the same numbers, and for each data-parallel rank, as other
        samples must not get the same. The first pass shows whether any are drawn: a draw changes the generator's state. Raises
        TrainingError if they are, and a step is several passes, or several processes'.
        """
        runtime = self._runtime
        for number, batch_and_weight in enumerate(passes):
            self._dropout.begin(batch_and_weight[0]["samples"])
            if self._draws_by_rank is not False:
                torch.manual_seed(derive_key(self._recipe.seed, "dropout", step, number, runtime.launched.data_rank))
            if self._draws_by_rank is not None:
                yield batch_and_weight
                continue
            state = _generator_state(runtime.device)
            yield batch_and_weight
            self._draws_by_rank = not torch.equal(state, _generator_state(runtime.device))
            with runtime.together():
                if self._draws_by_rank:
                    parts = runtime.launched.processes_per_rank
                    sentence = self._dropout.said_of_others(runtime.plan, parts=parts)
                    if runtime.plan.passes * parts > 1:
                        raise TrainingError(sentence)
                    self._say(f"note: {sentence}")


def _generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that operations on the device draw from.

    Next to a GPU the host's says nothing: a thread that fetches samples seeds it.
    """
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()


def _train_batches(recipe: Recipe, samples: Samples, first_step: int, last_step: int, *, micro_batches: int) -> TrainBatches:
    """Return the sampler of these steps (from 0), each of so many global micro-batches."""
    return TrainBatches(
        size=len(samples),
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batches_per_step=micro_batches,
        first_step=first_step,
        last_step=last_step,
        shuffled=not isinstance(samples, Mixture),
    )
