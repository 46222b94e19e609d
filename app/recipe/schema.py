"""What is learnt: the recipe, typed and frozen; and how its global batch is divided among ranks (`BatchPlan`).

A recipe knows nothing of machines: no device, no number of processes, no address. Its keys are `section.field`, as in
`optim.lr=0.1`. Those that any task has stand below, each with its default and its meaning (with the unit), and `samerun recipes
--keys` prints them from here; a task has sections of its own (`app/tasks`). `recipe_file.load` builds a `Recipe` from a YAML
file and `key=value` overrides.

A section may list keys in class variables:
`not_learnt`: they do not affect what is trained, but what is logged, how often is evaluated, how data is fetched, how much
memory is used, or in which order a kernel adds;
`places`: paths of something whose fingerprint is compared, so that a resumed run may find it elsewhere; of a list of mappings,
the `path` of each;
`contents`: files whose content, and not their name, decides what is trained;
`hub`: paths that can be a model of the hub, `hub:OWNER/NAME@REVISION`;
`by_step`: lists of changes, each with the step `from_step` that it begins with: a resumed run may have others beyond its step.

Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from app import tasks
from app.errors import RecipeError
from app.files import hub
from app.recipe import optimizers, task_file
from app.recipe.kinds import NOT_NEGATIVE, POSITIVE, SHARE, Problem, Range, out_of_range, problem

ALL_KEYS = ("*",)
"""For `not_learnt`, of a section none of whose keys decides what is learnt."""
PUBLISHED = "torchvision:"
"""What `train.init_from` begins with where it is the name of published weights."""
MOST_STEPS = 10**9
"""Of a run. More are a slip of the hand: at a thousand steps a second, which hardly any run reaches, these take twelve days."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """Length, batches and arithmetic of the training."""

    not_learnt: ClassVar[tuple[str, ...]] = (
        "evaluate_every_epochs", "evaluate_every_steps", "max_validation_samples", "max_micro_batch",
        "checkpoint_activations", "max_skipped_steps", "deterministic", "download",
    )  # fmt: skip
    places: ClassVar[tuple[str, ...]] = ("init_from",)
    hub: ClassVar[tuple[str, ...]] = ("init_from",)

    global_batch_size: Annotated[int, POSITIVE] = 128
    """Samples per optimizer step, summed over all processes."""
    max_micro_batch: Annotated[int | Literal["auto"] | None, POSITIVE] = None
    """Upper limit on the samples of one forward pass on one process. Bounds memory; gradient accumulation keeps the result
    unchanged. auto: `samerun launch` halves it and resumes the run whenever memory runs out (docs/big-models.md). None: no
    limit."""
    checkpoint_activations: Literal["none", "blocks"] = "none"
    """Activation checkpointing. blocks: keep only the input of each layer (as named by a transformers model or by the task)
    and recompute the rest in the backward pass. Saves memory, takes about a third more time, changes no result."""
    epochs: Annotated[int | None, POSITIVE] = None
    """Length of the run in epochs. Give this or train.steps; with neither, 10 epochs."""
    steps: Annotated[int | None, Range(gt=0, le=MOST_STEPS)] = None
    """Length of the run in optimizer steps. Give this or train.epochs."""
    validation_fraction: Annotated[float | None, Range(gt=0, lt=1)] = None
    """Fraction of the training samples held out for validation, for data without a validation split. The seed alone selects
    them. None: nothing is held out."""
    evaluate_every_epochs: Annotated[int | None, NOT_NEGATIVE] = None
    """Evaluate on the validation split every N epochs; 0: only at the end. Give this or evaluate_every_steps; with neither,
    after every epoch."""
    evaluate_every_steps: Annotated[int | None, POSITIVE] = None
    """Evaluate on the validation split every N steps. Give this or evaluate_every_epochs."""
    max_validation_samples: Annotated[int | None, POSITIVE] = None
    """Evaluate on at most N samples of the validation split, always the same ones. None: all."""
    stop_after_evaluations_without_gain: Annotated[int | None, POSITIVE] = None
    """Early stopping: end the run when the task's validation metric (for images the accuracy) has not improved for N
    evaluations in a row. None: off."""
    max_skipped_steps: Annotated[int, NOT_NEGATIVE] = 10
    """A step whose gradient is not finite, or is a spike, is skipped. More than N skipped steps in a row end the run."""
    max_gradient_spike: Annotated[float | None, Range(gt=1)] = 1000.0
    """A step is skipped as a spike if its gradient norm is more than N times the median norm of the last 128 steps, or of the
    first 64 if that is greater. Checked from step 65 on. None: off."""
    skip_steps: tuple[tuple[int, int], ...] | None = None
    """Steps to skip, in half-open ranges: [[5300, 5320]] skips steps 5300 to 5319, as metrics.jsonl numbers them. Their global
    batches are read but not applied: weights, optimizer state and moving average do not change, the learning rate advances.
    None: none."""
    ema_decay: Annotated[float | None, Range(gt=0, le=1)] = None
    """Decay per step of an exponential moving average (EMA) of the weights. The average is what is evaluated and exported.
    None: off."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights. float64 makes rounding errors negligible, for checking that two runs are the same."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over all processes instead of each process's micro-batch (GPUs only)."""
    channels_last: bool | None = None
    """Keep images and activations in channels-last memory order, which is faster on tensor cores and for max-pooling on CPUs.
    None: on for the convnet, and for every model on tensor cores (GPUs in half precision or TF32)."""
    tf32: bool = False
    """Let NVIDIA GPUs round the inputs of float32 convolutions and matrix products to TF32 (10 of 23 mantissa bits). Much
    faster, but the results differ (docs/same-run.md). CPUs ignore it. false: IEEE float32 everywhere."""
    deterministic: bool = False
    """Use only deterministic kernels: the same devices give the same bits each time. Slower; an operation without such a
    kernel is an error."""
    init_from: str | None = None
    """Initial weights, for fine-tuning (docs/checkpoints.md): a safetensors, .pth or .ckpt file, a run folder, a checkpoint, a
    folder of transformers, timm, Accelerate, DCP or DeepSpeed, hub:OWNER/NAME or hub:OWNER/NAME@REVISION for a model of the
    Hugging Face hub, or torchvision:NAME for published weights, such as torchvision:ResNet50_Weights.IMAGENET1K_V2. `~` and
    variables are expanded. None: random weights from the seed."""
    init_allow: tuple[str, ...] | None = None
    """Name patterns, such as decoder.*, of parameters that may differ from train.init_from. Parameters that are missing there
    or have another shape keep their random weights; parameters that the model lacks are ignored. The last layer may always
    differ."""
    download: bool = False
    """Allow one process per node to download what train.init_from, or model.path of a language model, names on the hub, or the
    published weights of train.init_from."""
    freeze: tuple[str, ...] | None = None
    """Name patterns, such as features.*, of parameters to freeze. None: all are trained."""

    @property
    def micro_batch_limit(self) -> int | None:
        """`max_micro_batch` as a number; None: no limit, or none that the recipe knows."""
        return self.max_micro_batch if isinstance(self.max_micro_batch, int) else None

    def skips(self, step: int) -> bool:
        """Return True if `skip_steps` has this step (from 1)."""
        return any(first <= step < end for first, end in self.skip_steps or ())

    def takes_channels_last(self, *, tensor_cores: bool, preferred: bool) -> bool:
        """Return whether images are kept in channels-last order.

        `tensor_cores`: whether these compute the products; `preferred`: whether the task's network is faster so anywhere.
        """
        return preferred or tensor_cores if self.channels_last is None else self.channels_last


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """The optimizer and the learning rate of each step."""

    name: str = "adamw"
    """Optimizer: sgd, adamw, adam, nadam, radam, adamax, rmsprop, adadelta, adagrad, adafactor or muon; or its class name,
    such as torch.optim.AdamW. adagrad and adafactor need unsharded parameters, so they do not run under ZeRO and FSDP2;
    muon does not run under ZeRO and tensor parallelism. Or the path of any other class, such as lion_pytorch.Lion or
    my_optimizer.MyLion, which is checked at the start (docs/optimizers.md)."""
    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Peak learning rate; with lr_reference_batch=B it is multiplied by global_batch_size/B."""
    lr_reference_batch: Annotated[int | None, POSITIVE] = None
    """Batch size that lr was chosen for (linear scaling rule): the peak rate is lr * global_batch_size / lr_reference_batch.
    None: no scaling."""
    momentum: Annotated[float, SHARE] = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's form of momentum (SGD)."""
    betas: Annotated[tuple[float, float], SHARE] = (0.9, 0.999)
    """Decay rates of the two moments, per step (adamw, adam, nadam, radam, adamax; muon's other parameters)."""
    eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    """Term added to the denominator (adamw, adam, nadam, radam, adamax, rmsprop, muon)."""
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    """Further arguments of the optimizer by torch's names, such as {alpha: 0.9, centered: true} for rmsprop; or those of your
    optimizer class: numbers, texts, true, false, null and lists of these."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay of matrices and convolution kernels. Norms and biases get none."""
    groups: Mapping[str, Mapping[str, float]] | None = field(default=None, hash=False)
    """Parameter groups with their own learning rate or weight decay, such as {"backbone.*": {lr_factor: 0.1, weight_decay: 0}}.
    lr_factor multiplies the learning rate of each step; weight_decay applies to every parameter in the group. An omitted value
    is as for the other parameters. Patterns match parameter names, with the shell's * and ?; the first match counts."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Gradient clipping: a gradient with a larger global norm is scaled down to this norm. None: off."""
    layer_decay: Annotated[float | None, Range(gt=0, le=1)] = None
    """Layer-wise decay: multiplies the learning rate of block i of n (as for train.checkpoint_activations) by
    layer_decay ** (n + 1 - i), and of what comes before the blocks by layer_decay ** (n + 1). None: off."""
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt", "polynomial", "step", "constant"] = "cosine"
    """Learning rate schedule after the warm-up (docs/optimizers.md). wsd: the peak, then a decay over the last decay_steps."""
    warmup_epochs: Annotated[float | None, NOT_NEGATIVE] = None
    """Linear warm-up from 0 to the peak, in epochs. Give this or warmup_steps; with neither, no warm-up."""
    warmup_steps: Annotated[int | None, NOT_NEGATIVE] = None
    """Linear warm-up from 0 to the peak, in steps. Give this or warmup_epochs."""
    final_lr_ratio: Annotated[float, SHARE] = 0.0
    """Learning rate at the end of a cosine, linear, wsd or polynomial schedule, as a fraction of the peak."""
    schedule_steps: Annotated[int | None, POSITIVE] = None
    """Step at which a cosine, linear, wsd or polynomial schedule ends; later steps keep the final rate. None: the last step."""
    decay_steps: Annotated[int | None, POSITIVE] = None
    """Length in steps of the decay at the end of the wsd schedule. None: a fifth of the schedule."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of the decay of the wsd schedule; sqrt is 1 - sqrt(progress)."""
    power: Annotated[float, POSITIVE] = 1.0
    """Exponent of the polynomial schedule; 1 is the linear schedule."""
    decay_epochs: Annotated[tuple[float, ...], POSITIVE] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule multiplies the rate by decay_factor."""
    decay_factor: Annotated[float, POSITIVE] = 0.1
    """Factor of the step schedule at each of decay_epochs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", optimizers.NAMES.get(self.name, self.name))
        for key in ("settings", "groups"):
            object.__setattr__(self, key, _with_floats(getattr(self, key)))


def _with_floats(value: Any) -> Any:
    """Return a mapping, or a list, with its whole numbers as floats, so that equal recipes have equal digests."""
    if isinstance(value, Mapping):
        return {name: _with_floats(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(it) for it in value]
    return float(value) if type(value) is int else value


@dataclass(frozen=True, kw_only=True)
class LogRecipe:
    """Logging."""

    not_learnt: ClassVar[tuple[str, ...]] = ALL_KEYS

    every_steps: Annotated[int, POSITIVE] = 50
    """Write a line of metrics.jsonl every N steps."""
    train_scores: bool = True
    """Also report the training metrics that the task computes with its loss, such as the training accuracy."""
    samples: bool = False
    """Also write samples.jsonl: the sample indices of each step, in order. Costs one gather per step."""
    each_step: bool = False
    """Also write steps.jsonl: loss, gradient norm and learning rate of each step. They are written together with the lines of
    metrics.jsonl, so steps do not wait for them."""
    examples: Annotated[int, NOT_NEGATIVE] = 16
    """Number of samples that TensorBoard and wandb show, as the model gets them, in the first steps of epochs 0, 1, 2, 4, ...
    A task that generates text shows its texts for at most 4 samples after each evaluation. 0: none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """When checkpoints are saved, from which a run resumes (`--resume`)."""

    not_learnt: ClassVar[tuple[str, ...]] = ALL_KEYS

    every_steps: Annotated[int | None, POSITIVE] = None
    """Save a checkpoint every N steps. None: not by steps."""
    every_minutes: Annotated[float | None, POSITIVE] = 15.0
    """Save a checkpoint about every N minutes. None: not by time. With neither, checkpoints are saved only on request."""
    keep_last: Annotated[int, Range(ge=1)] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int | None, POSITIVE] = None
    """Also save a checkpoint every N steps, and keep all of these. None: off."""
    keep_best: bool = False
    """Also keep the best checkpoint: one is saved whenever the task's validation metric (for images the accuracy) is the best
    so far."""

    @property
    def are_wanted(self) -> bool:
        """True if checkpoints are saved; then the last step gets one too."""
        return self.keep_best or any((self.every_steps, self.every_minutes, self.keep_every))


@dataclass(frozen=True, kw_only=True)
class ProfileRecipe:
    """A profiler trace of some steps on each rank (docs/profiling.md)."""

    not_learnt: ClassVar[tuple[str, ...]] = ALL_KEYS

    steps: str | None = None
    """First and last step to trace with the profiler, such as 10:20 (docs/profiling.md). None: no trace."""

    @property
    def window(self) -> tuple[int, int] | None:
        """First and last step, 1 being the first of the run; None: no trace. Raises ValueError if `steps` is not that."""
        if self.steps is None:
            return None
        first, last = (int(part) for part in self.steps.split(":"))
        if not 1 <= first <= last:
            raise ValueError(f"{first}:{last} is not a range of steps")
        return first, last


def sections_of(task: str) -> type:
    """Return the dataclass of a task's own sections. Raises RecipeError if there is no such task, or its file is wrong."""
    if task_file.is_own(task):
        own = task_file.sections_of(task)
        if taken := {section.name for section in fields(Recipe)} & {section.name for section in fields(own)}:
            raise RecipeError(f"task is {task}: rename {' and '.join(sorted(taken))}, a section that every recipe has")
        return own
    if task not in tasks.SHIPPED:
        raise RecipeError(
            f"task is {task!r}: there is no such task; there is {', '.join(tasks.SHIPPED)}, or a file of your own, my_task.py"
        )
    found: type = importlib.import_module(f"{tasks.SHIPPED[task]}.sections").Sections
    return found


def _default_sections() -> Any:
    return sections_of(tasks.DEFAULT)()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what is learnt. The same recipe gives the same run on any topology."""

    seed: Annotated[int, Range(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights, the sample order and the augmentation."""
    task: str = tasks.DEFAULT
    """Task: image_classification, causal_lm, or a Python file of your own, relative to the recipe (docs/your-own-task.md).
    Each task adds its own sections to the recipe."""
    sections: Any = field(default_factory=_default_sections)
    """The task's own sections: its `Sections`. `group_size` is the number of neighbouring samples that are computed together,
    so that every micro-batch contains whole groups of them, and `why_grouped` the reason; `inputs` are, by key, files that must
    be there before the run; `contradictions()` are the problems of values that contradict each other."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    profile: ProfileRecipe = field(default_factory=ProfileRecipe)

    def __post_init__(self) -> None:
        own = self.sections
        assert isinstance(self.sections, sections_of(self.task)), f"these are no sections of {self.task}"
        problems = [*out_of_range(own), *own.contradictions(), *out_of_range(self)]
        problems += [*optimizers.problems_of(self.optim), *_contradictions(self)]
        if problems:
            raise RecipeError(*problems)

    @property
    def inputs(self) -> dict[str, str | None]:
        """Files and folders that must be there before the run, each by its key, None if the recipe lacks the path of one.

        `~` and variables are not filled in.
        """
        begins_with = self.train.init_from
        own = {} if begins_with is None or begins_with.startswith((PUBLISHED, hub.PREFIX)) else {"train.init_from": begins_with}
        return {**self.sections.inputs, **own}


def changes_upto(changes: Iterable[Mapping[str, Any]] | None, step: int) -> list[Mapping[str, Any]]:
    """Return the entries of a list that `by_step` names which begin up to a step."""
    return [change for change in changes or () if change["from_step"] <= step]


def skipped_upto(spans: Iterable[Iterable[int]] | None, step: int) -> list[list[int]]:
    """Return the part of `train.skip_steps` up to a step."""
    return [[first, min(end, step + 1)] for first, end in spans or () if first <= step]


# Pairs of keys of which only one may be given: two units of the same duration.
ALTERNATIVES = (
    ("train.epochs", "train.steps"),
    ("train.evaluate_every_epochs", "train.evaluate_every_steps"),
    ("optim.warmup_epochs", "optim.warmup_steps"),
)


def problems_of_mixture(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of keys that count epochs, which a mixture of sources does not have."""
    why = "the training samples are a mixture of sources, which has no epochs"
    remedies = {
        "train.epochs": "train.steps",
        "train.evaluate_every_epochs": "train.evaluate_every_steps",
        "optim.warmup_epochs": "optim.warmup_steps",
    }
    for key, remedy in remedies.items():
        if attrgetter(key)(recipe):
            yield problem(recipe, f"{why}: give {remedy} instead", key)
    if recipe.train.steps is None and recipe.train.epochs is None:
        yield problem(recipe, f"{why}: give the length of the run in steps", "train.steps")
    if recipe.optim.schedule == "step":
        yield problem(recipe, f"{why}, and this schedule counts them: give another one", "optim.schedule")


def _contradictions(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    for pair in ALTERNATIVES:
        if None not in attrgetter(*pair)(recipe):
            yield problem(recipe, "give one of them", *pair)
    if train.init_allow is not None and train.init_from is None:
        yield problem(recipe, "init_allow needs init_from", "train.init_allow", "train.init_from")
    if hub.is_malformed(train.init_from):
        yield problem(recipe, hub.EXPECTED, "train.init_from")
    spans = train.skip_steps or ()
    if any(first < 1 or first >= end for first, end in spans) or any(end > first for (_, end), (first, _) in pairwise(spans)):
        words = "it must list ranges of steps from 1 on, each with its first step and the step after its last, in order"
        yield problem(recipe, f"{words} and without overlap, as in [[10, 20], [30, 31]]", "train.skip_steps")
    elif spans and train.steps is not None and spans[-1][1] > train.steps + 1:
        yield problem(recipe, "skip only steps of the run", "train.skip_steps", "train.steps")
    group_size, because = recipe.sections.group_size, f"because {recipe.sections.why_grouped}"
    if train.global_batch_size % group_size:
        yield problem(recipe, f"it must be a multiple of {group_size}, {because}", "train.global_batch_size")
    if train.micro_batch_limit is not None and train.micro_batch_limit < group_size:
        yield problem(recipe, f"it must be at least {group_size}, {because}", "train.max_micro_batch")
    if recipe.optim.nesterov and recipe.optim.momentum == 0:
        yield problem(recipe, "nesterov needs a momentum greater than 0", "optim.nesterov", "optim.momentum")
    try:
        _ = recipe.profile.window
    except ValueError:
        yield problem(recipe, "it must be the first and the last step to record, from 1 on, as in 10:20", "profile.steps")


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the global batch is divided: `global_batch_size = micro_batch x accumulation x data_ranks`.

    The global batch belongs to the recipe and never changes; the other three are derived here, so that every topology sees the
    same samples in the same step. A data-parallel rank is a process; under tensor or context parallelism it is a group of
    them, which compute the same samples together.
    """

    global_batch_size: int
    """Samples in one optimizer step, over all ranks."""
    data_ranks: int
    """Data-parallel ranks, which divide the batch."""
    accumulation: int
    """Forward passes of each rank in one optimizer step."""
    processes_per_rank: int = 1
    """Processes of each rank."""
    is_auto: bool = False
    """True if the next start of the run may have a smaller micro-batch (`train.max_micro_batch=auto`)."""

    @property
    def micro_batch(self) -> int:
        """Samples in one forward pass on one rank."""
        return self.global_batch_size // (self.data_ranks * self.accumulation)

    def __str__(self) -> str:
        """`global batch 64 = micro-batch 16 x accumulation 2 x 2 processes`."""
        several, each = self.data_ranks > 1, self.processes_per_rank
        ranks = f"data-parallel rank{'s' * several} of {each} processes" if each > 1 else f"process{'es' * several}"
        batches = f"micro-batch {self.micro_batch}{' (auto)' * self.is_auto} x accumulation {self.accumulation}"
        return f"global batch {self.global_batch_size} = {batches} x {self.data_ranks} {ranks}"

    @property
    def passes(self) -> int:
        """Forward passes of a step, on all ranks together; at least 2 where the next start may take more."""
        return max(self.data_ranks * self.accumulation, 1 + self.is_auto)

    @classmethod
    def of(cls, recipe: Recipe, data_ranks: int, *, processes_per_rank: int = 1, most: int | None = None) -> BatchPlan:
        """Return the plan with the fewest forward passes whose micro-batch is at most `train.max_micro_batch` samples.

        If that is auto, it is at most `most`; None: as large as the global batch allows.
        Every micro-batch contains whole groups of the task's `group_size` samples (mixup mixes pairs).
        Raises RecipeError, which names possible numbers of processes, if no plan exists.
        """
        global_batch_size, is_auto = recipe.train.global_batch_size, recipe.train.max_micro_batch == "auto"
        max_micro_batch = most if is_auto else recipe.train.micro_batch_limit
        group_size, why_grouped = recipe.sections.group_size, recipe.sections.why_grouped

        def passes(ranks: int) -> int | None:
            share, rest = divmod(global_batch_size, ranks)
            most = max_micro_batch or share
            fitting = (it for it in range(1, share + 1) if share % (it * group_size) == 0 and share // it <= most)
            return None if rest else next(fitting, None)

        if accumulation := passes(data_ranks):
            sizes = {"global_batch_size": global_batch_size, "data_ranks": data_ranks, "processes_per_rank": processes_per_rank}
            return cls(**sizes, accumulation=accumulation, is_auto=is_auto)
        legal = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0 and passes(size)]
        near = sorted(sorted(legal, key=lambda size: abs(size - data_ranks))[:8])
        choices = ", ".join(str(size * processes_per_rank) for size in near)
        remedy = f"use {choices} processes, or" if choices else "no number of processes works:"
        conditions = (
            f"equal micro-batches of a multiple of {group_size} ({why_grouped})" if group_size > 1 else "equal micro-batches"
        )
        if max_micro_batch is not None:
            conditions += f" of at most {max_micro_batch} samples (train.max_micro_batch)"
        ranks = f"{data_ranks} data-parallel ranks of {processes_per_rank}" if processes_per_rank > 1 else f"{data_ranks}"
        raise RecipeError(
            f"train.global_batch_size is {global_batch_size}, which {ranks} processes cannot split into {conditions}: "
            f"{remedy} change train.global_batch_size (a multiple of {data_ranks * group_size} always works)"
        )
