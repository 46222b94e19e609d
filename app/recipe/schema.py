"""What is learnt: the recipe, typed and frozen.

A recipe knows nothing of machines: no device, no number of processes, no address. Its keys are `section.field`, as in
`optim.lr=0.1`. Those that any task has stand below, each with its default and its meaning (with the unit), and `--help` prints
them from here; a task has sections of its own (`app/tasks`). `recipe_file.load` builds a `Recipe` from a YAML file and
`key=value` overrides.

A section may say of its keys, in two class variables:
`not_learnt`: these decide nothing of what is learnt, but what is written down, how often is evaluated, how data gets here, what
bounds memory, in which order a kernel adds up;
`places`: these say where something lies of which a fingerprint is compared, so that a resumed run may find it elsewhere.

Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from app import tasks
from app.errors import RecipeError
from app.recipe import optimizers, ranges, task_file

ALL_KEYS = ("*",)
"""For `not_learnt`, of a section none of whose keys decides what is learnt."""
PUBLISHED = "torchvision:"
"""What `train.init_from` begins with where it is the name of published weights."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How long, in which batches, and in which arithmetic."""

    not_learnt: ClassVar = (
        "evaluate_every_epochs",
        "evaluate_every_steps",
        "max_validation_samples",
        "max_micro_batch",
        "checkpoint_activations",
        "max_skipped_steps",
        "deterministic",
        "download",
    )
    places: ClassVar = ("init_from",)

    global_batch_size: int = 128
    """Samples in one optimizer step, over all processes."""
    max_micro_batch: int | None = None
    """Most samples in one forward pass on one process; bounds memory, changes no result. None: no bound."""
    checkpoint_activations: Literal["none", "blocks"] = "none"
    """What the backward pass computes again instead of keeping it: blocks, the layers that a model (as those of transformers)
    or a task names, of each of which only the input is kept then. Takes about a third more time; changes no result."""
    epochs: int | None = None
    """Length in epochs. Give this or steps; with neither, 10 epochs."""
    steps: int | None = None
    """Length in optimizer steps. Give this or epochs."""
    validation_fraction: float | None = None
    """Share of the training samples that is held out for validation, chosen by the seed alone: for data without a validation
    split of its own. None: nothing is held out."""
    evaluate_every_epochs: int | None = None
    """Epochs between two evaluations on the validation split; 0: only at the end. Give this or evaluate_every_steps; with
    neither, after every epoch."""
    evaluate_every_steps: int | None = None
    """Steps between two evaluations on the validation split. Give this or evaluate_every_epochs."""
    max_validation_samples: int | None = None
    """Most samples of the validation split that are looked at: always the same, chosen by the seed. None: all."""
    stop_after_evaluations_without_gain: int | None = None
    """End the run when so many evaluations in a row have not bettered the validation score by which the task is judged (for
    pictures the accuracy). None: it takes all its steps."""
    max_skipped_steps: int = 10
    """Most steps in a row that may be skipped, for a gradient that is not finite or a spike; one more ends the run."""
    max_gradient_spike: float | None = 1000.0
    """Most times the median gradient norm of the last 128 steps, or of the first 64 if that is greater, that a norm may be; a
    step on a larger one is skipped, from the 65th on. None: no bound."""
    ema_decay: float | None = None
    """Decay per step of the moving average of the weights that is then evaluated and exported. None: off."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights. float64 is for checking that runs are the same, at a precision that leaves no doubt."""
    sync_batchnorm: bool = False
    """Compute batch statistics over all processes instead of each one's micro-batch (GPUs only)."""
    channels_last: bool | None = None
    """Keep images in channels-last memory order, which convolutions and what follows them then follow: on CPU max-pooling
    takes a fifth of its time so, and the tensor cores of GPUs work in it. Weights follow where they are in half precision.
    None: for the convnet, and for every model that tensor cores compute: on GPUs in half precision or TF32."""
    tf32: bool = False
    """Round the factors of float32 convolutions and matrix products to TF32, 10 bits of 23: several times as fast on NVIDIA
    GPUs, and another computation (docs/same-run.md). CPUs do not. false: IEEE's float32 everywhere."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time on the same devices: slower; operations that have none are refused."""
    init_from: str | None = None
    """Begin with these weights, as for fine-tuning (docs/checkpoints.md): a safetensors or .pth file, a run folder, a
    checkpoint, a folder of transformers, or torchvision:NAME for published ones, such as
    torchvision:ResNet50_Weights.IMAGENET1K_V2; `~` and variables are filled in. None: those of the seed."""
    init_allow: tuple[str, ...] | None = None
    """Patterns of names, such as decoder.*, of what train.init_from need not fit: it stays new where it is not there, or of
    another shape, and is left out where the model has none. The last layer need not fit either way."""
    download: bool = False
    """Whether published weights of train.init_from may be downloaded, by one process per node."""
    freeze: tuple[str, ...] | None = None
    """Patterns of parameters' names, such as features.*, that are not trained. None: all are."""

    def takes_channels_last(self, *, tensor_cores: bool, preferred: bool) -> bool:
        """Return whether images are kept in channels-last order.

        `tensor_cores`: whether these compute the products; `preferred`: whether the task's network is faster so anywhere.
        """
        return preferred or tensor_cores if self.channels_last is None else self.channels_last


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """The optimizer and the learning rate of each step."""

    name: str = "adamw"
    """Optimizer: sgd, adamw, adam, nadam, radam, adamax, rmsprop, adadelta, adagrad or adafactor, or its class, as in
    torch.optim.AdamW. The last two need whole parameters: not under ZeRO and FSDP2."""
    lr: float = 1e-3
    """Peak learning rate, for a global batch of lr_reference_batch samples if that is given, for any otherwise."""
    lr_reference_batch: int | None = None
    """Linear scaling rule: the peak is lr * global_batch_size / lr_reference_batch. None: no scaling."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's form of momentum (SGD)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments, per step (adamw, adam, nadam, radam, adamax)."""
    eps: float = 1e-8
    """Term added to the denominator (those, and rmsprop)."""
    settings: tuple[str, ...] | None = None
    """What else the optimizer takes, each NAME=VALUE by torch's names, as in alpha=0.9,centered=true for rmsprop."""
    weight_decay: float = 0.0
    """Weight decay of matrices and kernels; norms and biases get none."""
    groups: tuple[str, ...] | None = None
    """Parameters with a rate or decay of their own, each PATTERN lr_factor=F weight_decay=W, as in "backbone.* lr_factor=0.1":
    F multiplies the learning rate of each step, W is the decay of all of them; what is left out is as for the others. The
    pattern is of names of parameters, with the shell's * and ?, and the first that matches counts."""
    clip_norm: float | None = None
    """Largest norm of the whole gradient; a larger one is scaled down to it. None: no clipping."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_epochs: float | None = None
    """Length in epochs of the linear rise from 0 to the peak. Give this or warmup_steps; with neither, no warm-up."""
    warmup_steps: int | None = None
    """Length in steps of the linear rise from 0 to the peak. Give this or warmup_epochs."""
    final_lr_ratio: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    cosine_steps: int | None = None
    """Step at which the cosine ends; those after it keep its final rate. None: the last step."""
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule multiplies the rate by decay_factor."""
    decay_factor: float = 0.1
    """Factor of the step schedule."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", optimizers.short(self.name))


@dataclass(frozen=True, kw_only=True)
class LogRecipe:
    """What is written down while training."""

    not_learnt: ClassVar = ALL_KEYS

    every_steps: int = 50
    """Steps between two lines of metrics.jsonl; a line costs about what one or two steps of a tiny model do."""
    train_scores: bool = True
    """Report what the task adds to its loss, such as the training accuracy."""
    samples: bool = False
    """Also write samples.jsonl: the indices of the samples of each step, in order. For checking runs; costs a gather a step."""
    examples: int = 16
    """Samples of a batch, as the model gets them, that TensorBoard and wandb show in the first steps of epochs 0, 1, 2, 4, ...;
    and of which, at most 4, a task that writes shows texts after an evaluation. 0: none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """When the state of the run is written down, to be resumed from (`--resume`)."""

    not_learnt: ClassVar = ALL_KEYS

    every_steps: int | None = None
    """Steps between two checkpoints. None: steps do not count."""
    every_minutes: float | None = 15.0
    """Minutes between two checkpoints, about. None: time does not count. With neither, there are none but on request."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = False
    """Save whenever an evaluation is the best so far, by the validation score that the task names (for pictures the accuracy),
    and keep the latest of these as well."""

    @property
    def are_wanted(self) -> bool:
        """Whether there are checkpoints at all; then the last step gets one too."""
        return self.every_steps is not None or self.every_minutes is not None or self.keep_best


@dataclass(frozen=True, kw_only=True)
class ProfileRecipe:
    """A trace of some steps, of all processes on one time axis (docs/profiling.md)."""

    not_learnt: ClassVar = ALL_KEYS

    steps: str | None = None
    """First and last step to record, as in 10:20: both are, and 1 is the first of the run. None: no trace."""

    @property
    def window(self) -> tuple[int, int] | None:
        """First and last step, 1 being the first of the run; None: no trace. Raises ValueError if `steps` is not that."""
        if self.steps is None:
            return None
        first, last = (int(part) for part in self.steps.split(":"))
        if not 1 <= first <= last:
            raise ValueError(f"{first}:{last} is no range of steps")
        return first, last


def sections_of(task: str) -> type:
    """Return the dataclass of a task's own sections. Raises RecipeError if there is no such task, or its file is wrong."""
    if task_file.is_own(task):
        own = task_file.sections_of(task)
        taken = {of_recipe.name for of_recipe in fields(Recipe)} & {section.name for section in fields(own)}
        if taken:
            raise RecipeError(
                f"task is {task}: it has a section {' and '.join(sorted(taken))}, as the application has: give it another name"
            )
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

    seed: int = 0
    """Seed of the initial weights, the order of the samples and their augmentation."""
    task: str = tasks.DEFAULT
    """What is learnt: the name of a task that comes with the package, or a Python file of your own, relative to the recipe
    (docs/your-own-task.md). A task has sections of its own."""
    sections: Any = field(default_factory=_default_sections)
    """The task's own sections: its `Sections`. Beside them it says how many `neighbours` of the order of samples are computed
    with together, so that every micro-batch holds whole groups of them, and in a sentence `why_neighbours`; and by key the
    `inputs`, files that have to be there before the run."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    profile: ProfileRecipe = field(default_factory=ProfileRecipe)

    def __post_init__(self) -> None:
        assert isinstance(self.sections, sections_of(self.task)), f"these are no sections of {self.task}"
        problems = ranges.problems_of(self)
        if problems:
            raise RecipeError(*problems)

    @property
    def inputs(self) -> dict[str, str]:
        """Files and folders that have to be there before the run, each by its key; `~` and variables are not filled in."""
        begins_with = self.train.init_from
        own = {} if begins_with is None or begins_with.startswith(PUBLISHED) else {"train.init_from": begins_with}
        return {**self.sections.inputs, **own}

    def with_sections(self, **changes: Any) -> Recipe:
        """Return the recipe with these of the task's sections in the place of its own."""
        return replace(self, sections=replace(self.sections, **changes))


# Pairs of keys of which only one may be given: two units of the same duration.
ALTERNATIVES = (
    ("train.epochs", "train.steps"),
    ("train.evaluate_every_epochs", "train.evaluate_every_steps"),
    ("optim.warmup_epochs", "optim.warmup_steps"),
)
