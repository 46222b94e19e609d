"""What is learnt: the recipe, typed and frozen.

A recipe knows nothing of machines: no device, no number of processes, no address. Its keys are `section.field`, as in
`optim.lr=0.1`; every key, its default and its meaning (with the unit) stand below, and `--help` prints them from here.
`recipe_file.load` builds a `Recipe` from a YAML file and `key=value` overrides.

Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from app.errors import RecipeError
from app.recipe import ranges


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The samples: where they are and what they look like."""

    source: Literal[
        "digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "fakedata", "huggingface",
        "webdataset", "hdf5", "lmdb", "tfrecord", "arrays",
    ] = "digits"  # fmt: skip
    """Kind of data. `digits` comes with the package; `huggingface` is whatever the `datasets` library opens; `arrays` is what
    `samerun data pack --to arrays` writes."""
    path: str | None = None
    """File, folder or hub name; `~` and variables are filled in. None looks in the usual places (`docs/data.md` lists them)."""
    hub_config: str | None = None
    """Configuration of the data set (huggingface): of the hub, or that the README.md of a folder names. None: the only one."""
    hub_revision: str | None = None
    """Commit of the data set of the hub (huggingface), all 40 digits of it, which pins what is read. None: the newest."""
    stage_to: str | None = None
    """Folder on a disk of the node, such as $SLURM_TMPDIR, that data.path is copied to before training, once. None: no copy."""
    download: bool = False
    """Whether missing data may be downloaded, by one process per node."""
    train_split: str = "train"
    """Name of the training split: a sub-folder for imagefolder, a split for huggingface, file names begin with it elsewhere."""
    test_split: str = "test"
    """Name of the test split, as for train_split."""
    image_column: str = "image"
    """Column, dataset or feature that holds the images (huggingface, hdf5, tfrecord)."""
    label_column: str = "label"
    """Column, dataset or feature that holds the labels (huggingface, hdf5, tfrecord)."""
    color: Literal["auto", "rgb", "gray"] = "auto"
    """What picture files are decoded to. auto: RGB, but gray for huggingface if all pictures that are sampled are gray."""
    jpeg_decoder: Literal["libjpeg", "reduced"] = "libjpeg"
    """Whose pixels JPEG files have. reduced: libjpeg's at 1/2 to 1/8 of the size, where the image asked for is no larger, so
    that large photographs take less time; needs data.image_size."""
    image_size: int | None = None
    """Side in pixels of the square image the model sees. None: as stored, for data whose images all have one size."""
    resize_size: int | None = None
    """For evaluation: length in pixels the shorter side gets before the centre crop to image_size. None: image_size."""
    mean: tuple[float, ...] = (0.5,)
    """Mean to subtract, per channel (or one for all), of pixel values scaled to 0..1."""
    std: tuple[float, ...] = (0.25,)
    """Standard deviation to divide by, per channel (or one for all), of pixel values scaled to 0..1."""
    fake_train_samples: int = 1280
    """Size of the training set in samples (fakedata)."""
    fake_test_samples: int = 256
    """Size of the test set in samples (fakedata)."""
    fake_classes: int = 10
    """Number of classes (fakedata)."""
    fake_channels: int = 3
    """Number of image channels (fakedata)."""


@dataclass(frozen=True, kw_only=True)
class AugmentRecipe:
    """Random changes to training images; each is a function of (seed, epoch, sample) alone. All off by default."""

    crop_padding: int = 0
    """Pixels of zero padding on each side before a random crop back to the image's size."""
    resized_crop_min_area: float | None = None
    """Smallest share of the picture's area that a random resized crop keeps (0.08 is usual on ImageNet). None: no such crop."""
    flip: float = 0.0
    """Probability of a left-right flip."""
    randaugment_ops: int = 0
    """Number of RandAugment operations in a row for each image."""
    randaugment_magnitude: float = 9.0
    """Strength of RandAugment operations, 0..10, as in the paper; torchvision's default of 9 in 31 steps is 3 here."""
    erase: float = 0.0
    """Probability of erasing a random rectangle."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup's weights. 0: off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of cutmix's areas. 0: off. With mixup as well, each pair gets one of the two."""
    label_smoothing: float = 0.0
    """Share of the target probability spread evenly over all classes, 0..1."""

    @property
    def mixes_pairs(self) -> bool:
        """Whether neighbouring samples are mixed, which needs an even micro-batch."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The network."""

    name: str = "convnet"
    """`convnet`, or any classification model of torchvision by its name (resnet18, vit_b_16, ...)."""
    norm: Literal["group", "batch", "identity"] = "group"
    """Normalisation of the convnet; identity: none. Batch statistics depend on the micro-batch, group statistics do not."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of the convnet. With gelu and average pooling it has no kinks, at which rounding decides a gradient."""
    pooling: Literal["max", "average"] = "max"
    """How the convnet halves the image."""
    channels: tuple[int, int] = (32, 64)
    """Output channels of the convnet's two convolutions."""
    hidden: int = 128
    """Width of the convnet's hidden linear layer, in units."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How long, and in which batches."""

    global_batch_size: int = 128
    """Samples in one optimizer step, over all processes."""
    max_micro_batch: int | None = None
    """Most samples in one forward pass on one process; bounds memory, changes no result. None: no bound."""
    epochs: int | None = None
    """Length in epochs. Give this or steps; with neither, 10 epochs."""
    steps: int | None = None
    """Length in optimizer steps. Give this or epochs."""
    evaluate_every_epochs: int = 1
    """Epochs between two evaluations on the test set; 0: only at the end."""
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

    def takes_channels_last(self, *, tensor_cores: bool, is_convnet: bool) -> bool:
        """Return whether images are kept in channels-last order; `tensor_cores`: whether these compute the products."""
        return is_convnet or tensor_cores if self.channels_last is None else self.channels_last


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """The optimizer and the learning rate of each step."""

    name: Literal["sgd", "adamw"] = "adamw"
    """Optimizer."""
    lr: float = 1e-3
    """Peak learning rate, for a global batch of lr_reference_batch samples if that is given, for any otherwise."""
    lr_reference_batch: int | None = None
    """Linear scaling rule: the peak is lr * global_batch_size / lr_reference_batch. None: no scaling."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's form of momentum (SGD)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments, per step."""
    eps: float = 1e-8
    """Term added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Weight decay of matrices and kernels; norms and biases get none."""
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
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule multiplies the rate by decay_factor."""
    decay_factor: float = 0.1
    """Factor of the step schedule."""


@dataclass(frozen=True, kw_only=True)
class LogRecipe:
    """What is written down while training."""

    every_steps: int = 50
    """Steps between two lines of metrics.jsonl; a line costs about what one or two steps of a tiny model do."""
    train_scores: bool = True
    """Report what the task adds to its loss, such as the training accuracy."""
    samples: bool = False
    """Also write samples.jsonl: the indices of the samples of each step, in order. For checking runs; costs a gather a step."""
    examples: int = 16
    """Samples of a batch, as the model gets them, that TensorBoard and wandb show in the first steps of epochs 0, 1, 2, 4, ...;
    0: none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """When the state of the run is written down, to be resumed from (`--resume`)."""

    every_steps: int | None = None
    """Steps between two checkpoints. None: steps do not count."""
    every_minutes: float | None = 15.0
    """Minutes between two checkpoints, about. None: time does not count. With neither, there are none but on request."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = False
    """Save whenever an evaluation has the best test accuracy so far, and keep the latest of these as well."""

    @property
    def are_wanted(self) -> bool:
        """Whether there are checkpoints at all; then the last step gets one too."""
        return self.every_steps is not None or self.every_minutes is not None or self.keep_best


@dataclass(frozen=True, kw_only=True)
class ProfileRecipe:
    """A trace of some steps, of all processes on one time axis (docs/reports.md)."""

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what is learnt. The same recipe gives the same run on any topology."""

    seed: int = 0
    """Seed of the initial weights, the order of the samples and their augmentation."""
    data: DataRecipe = field(default_factory=DataRecipe)
    augment: AugmentRecipe = field(default_factory=AugmentRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    profile: ProfileRecipe = field(default_factory=ProfileRecipe)

    def __post_init__(self) -> None:
        problems = ranges.problems_of(self)
        if problems:
            raise RecipeError(*problems)


# Pairs of keys of which only one may be given: two units of the same duration.
ALTERNATIVES = (("train.epochs", "train.steps"), ("optim.warmup_epochs", "optim.warmup_steps"))
