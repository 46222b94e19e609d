"""The sections of a recipe that classifies images: where they are, how they are changed at random, and the network.

Each key has its type, range, default and meaning (with its unit), as in `app/recipe/schema.py`. It needs no torch: login nodes
read it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from app.errors import did_you_mean
from app.recipe.kinds import NOT_NEGATIVE, POSITIVE, SHARE, Problem, Range, problem

CONVNET = "convnet"
TIMM = "timm:"
"""Prefix of the names of timm's models."""
_TORCHVISION_MODELS = Path(__file__).with_name("torchvision_models.txt")
"""Names that `torchvision.models.list_models` gives: a login node, without torch, refuses a misspelt one before the queue."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The samples: where they are and what they look like."""

    not_learnt: ClassVar[tuple[str, ...]] = ("stage_to", "download")
    places: ClassVar[tuple[str, ...]] = ("path", "leave_out")
    contents: ClassVar[tuple[str, ...]] = ("leave_out",)

    source: Literal[
        "digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "imagefolder", "fakedata", "huggingface",
        "webdataset", "hdf5", "lmdb", "tfrecord", "arrays",
    ] = "digits"  # fmt: skip
    """Format of the data (docs/data.md). `digits` comes with the package; `huggingface` is anything that the `datasets` library
    opens; `arrays` is the format of `samerun data pack --to arrays`."""
    path: str | None = None
    """File, folder or hub name. `~` and variables are expanded. None: look in the usual places (docs/data.md)."""
    leave_out: str | None = None
    """File with the names of samples to exclude, as `samerun data check --write FILE` writes it (imagefolder, huggingface,
    webdataset, hdf5, lmdb, tfrecord). None: no sample."""
    hub_config: str | None = None
    """Configuration of the dataset (huggingface), as the hub or the README.md of a folder names it. None: the only one."""
    hub_revision: str | None = None
    """Commit of the hub's dataset (huggingface), all 40 digits. Pins the data. None: the newest."""
    stage_to: str | None = None
    """Folder on a local disk of each node, such as $SLURM_TMPDIR, to copy data.path to before training. None: no copy."""
    download: bool = False
    """Allow one process per node to download missing data."""
    train_split: str = "train"
    """Name of the training split: a subfolder for imagefolder, a split for huggingface, the start of file names elsewhere."""
    validation_split: str | None = None
    """Name of the validation split, as for train_split. None: `val`, `valid` or `validation`, if one exists."""
    test_split: str | None = None
    """Name of the test split, as for train_split. None: `test`, if it exists."""
    image_column: str = "image"
    """Column, dataset or feature that holds the images (huggingface, hdf5, tfrecord)."""
    label_column: str = "label"
    """Column, dataset or feature that holds the labels (huggingface, hdf5, tfrecord)."""
    color: Literal["auto", "rgb", "gray"] = "auto"
    """Color mode that image files are decoded to. auto: RGB; for huggingface gray, if all images of a sample are gray."""
    image_size: Annotated[int | None, POSITIVE] = None
    """Side of the square image that the model gets, in pixels. None: as stored; all images must have one size."""
    resize_size: Annotated[int | None, POSITIVE] = None
    """In evaluation, resize the shorter side to N pixels before the center crop to image_size. None: image_size."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of resized images, antialiased."""
    mean: tuple[float, ...] = (0.5,)
    """Mean to subtract from pixel values scaled to 0..1: one per channel, or one for all."""
    std: Annotated[tuple[float, ...], POSITIVE] = (0.25,)
    """Standard deviation to divide pixel values by, after subtracting the mean: one per channel, or one for all."""
    fake_train_samples: Annotated[int, POSITIVE] = 1280
    """Size of the training set in samples (fakedata)."""
    fake_test_samples: Annotated[int, POSITIVE] = 256
    """Size of the test set in samples (fakedata)."""
    fake_classes: Annotated[int, Range(ge=2)] = 10
    """Number of classes (fakedata)."""
    fake_channels: Annotated[int, POSITIVE] = 3
    """Number of image channels (fakedata)."""


@dataclass(frozen=True, kw_only=True)
class AugmentRecipe:
    """Random changes to training images; each is a function of (seed, epoch, sample) alone. All off by default."""

    crop_padding: Annotated[int, NOT_NEGATIVE] = 0
    """Pixels of zero padding on each side before a random crop back to the image's size."""
    resized_crop_min_area: Annotated[float | None, Range(gt=0, le=1)] = None
    """Random resized crop: the smallest fraction of the area to keep (0.08 is usual on ImageNet). None: off."""
    flip: Annotated[float, SHARE] = 0.0
    """Probability of a horizontal flip."""
    randaugment_ops: Annotated[int, NOT_NEGATIVE] = 0
    """Number of RandAugment operations applied to each image."""
    randaugment_magnitude: Annotated[float, Range(ge=0, le=10)] = 9.0
    """RandAugment magnitude, 0..10 as in the paper. torchvision's default (9 of 31 steps) is 3 here."""
    erase: Annotated[float, SHARE] = 0.0
    """Probability of erasing a random rectangle."""
    mixup: Annotated[float, NOT_NEGATIVE] = 0.0
    """Alpha of mixup's Beta distribution. 0: off."""
    cutmix: Annotated[float, NOT_NEGATIVE] = 0.0
    """Alpha of cutmix's Beta distribution. 0: off. With mixup also on, each pair gets one of the two."""
    label_smoothing: Annotated[float, SHARE] = 0.0
    """Fraction of the target probability spread evenly over all classes, 0..1."""

    @property
    def mixes_pairs(self) -> bool:
        """Whether neighbouring samples are mixed, which needs an even micro-batch."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The network."""

    name: str = "convnet"
    """`convnet`, the name of any torchvision classification model (resnet18, vit_b_16, ...), or timm:NAME for timm's, such as
    timm:resnet50.a1_in1k. With timm:NAME, keys that the recipe leaves out (data.image_size, resize_size, interpolation, mean,
    std) have the values of timm's configuration: of the config.json in train.init_from, or else of the name."""
    norm: Literal["group", "batch", "identity"] = "group"
    """Normalization of the convnet; identity: none. Batch statistics depend on the micro-batch size, group statistics do
    not."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of the convnet. gelu with average pooling is smooth, so rounding changes gradients least."""
    pooling: Literal["max", "average"] = "max"
    """Pooling of the convnet."""
    channels: Annotated[tuple[int, int], POSITIVE] = (32, 64)
    """Output channels of the convnet's two convolutions."""
    hidden: Annotated[int, POSITIVE] = 128
    """Width of the convnet's hidden linear layer."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections of a recipe that only this task has."""

    why_grouped: ClassVar[str] = "augment.mixup and augment.cutmix mix pairs of neighbouring samples"
    data: DataRecipe = field(default_factory=DataRecipe)
    augment: AugmentRecipe = field(default_factory=AugmentRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)

    def contradictions(self) -> Iterator[Problem]:
        """Yield the problems of values that contradict each other."""
        data = self.data
        if unknown := model_name_problem(self.model.name):
            yield Problem(unknown, "model.name")
        for key in ("hub_config", "hub_revision"):
            if getattr(data, key) and data.source != "huggingface":
                yield problem(self, f"{key} is for data.source=huggingface", f"data.{key}", "data.source")
        if data.hub_revision is not None and not re.fullmatch("[0-9a-f]{40}", data.hub_revision):
            commit = "it must be a commit, all 40 hexadecimal digits of it, because branches and tags move"
            yield problem(self, f"{commit} (the hub shows it under Files and versions)", "data.hub_revision")
        for key in ("augment.resized_crop_min_area", "data.resize_size"):
            if attrgetter(key)(self) is not None and data.image_size is None:
                yield problem(self, "give data.image_size, the size in pixels of the crop", key, "data.image_size")
        if data.resize_size is not None and data.image_size is not None and data.resize_size < data.image_size:
            yield problem(self, "resize_size must be at least image_size", "data.resize_size", "data.image_size")
        if data.leave_out is not None and data.source not in _DECODED:
            yield problem(self, f"leave_out is for {', '.join(_DECODED)}", "data.leave_out", "data.source")
        if len(data.mean) != len(data.std):
            yield problem(self, "give each one value per channel, or one for all", "data.mean", "data.std")

    @property
    def model_keys(self) -> tuple[str, ...]:
        """Keys that get values of the model if the recipe leaves them out (`ImageClassification.model_defaults`)."""
        keys = ("image_size", "resize_size", "interpolation", "mean", "std")
        return tuple(f"data.{key}" for key in keys) if self.model.name.startswith(TIMM) else ()

    @property
    def group_size(self) -> int:
        """How many neighbouring samples are computed with together: every micro-batch holds whole groups of them."""
        return 2 if self.augment.mixes_pairs else 1

    @property
    def inputs(self) -> Mapping[str, str | None]:
        """Files and folders that must be there before the run, each by its key, None if the recipe lacks the path of one.

        `~` and variables are not filled in.
        """
        path = self.data.path
        # A name of the hub looks like a relative path.
        is_name = self.data.source == "huggingface" and not Path(path or "").expanduser().is_absolute()
        is_needed = path is None and self.data.source in (*_DECODED, "arrays")
        is_there_before = path is not None and not is_name and not self.data.download
        found: dict[str, str | None] = {"data.path": path} if is_needed or is_there_before else {}
        return found if self.data.leave_out is None else {**found, "data.leave_out": self.data.leave_out}


_DECODED = ("imagefolder", "huggingface", "webdataset", "hdf5", "lmdb", "tfrecord")


@functools.cache
def model_names() -> tuple[str, ...]:
    """Return all values of model.name, our own first."""
    return CONVNET, *_TORCHVISION_MODELS.read_text().split()


def model_name_problem(name: str) -> str | None:
    """Return what is wrong with a value of model.name, with the nearest names that exist, or None.

    The names of timm are not known here, without timm.
    """
    if name in model_names() or re.fullmatch(rf"{TIMM}\w[\w.-]*", name, re.ASCII):
        return None
    otherwise = "expected convnet, a torchvision model or timm:NAME (or task=causal_lm)"
    hint = did_you_mean(name, model_names(), otherwise=otherwise)
    return f"model.name is {name!r}: no such model; {hint}"


def torchvision_arguments(name: str, image_size: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a torchvision model for images of this size, but for the number of classes. Raises ValueError."""
    if name.startswith("vit_"):
        if image_size[0] != image_size[1]:
            raise ValueError("this model needs square images")
        return {"image_size": image_size[0]}
    if name.startswith("maxvit"):
        return {"input_size": image_size}
    if name in ("googlenet", "inception_v3"):
        # One output, and the initial weights of the papers; without the latter torchvision warns of a coming change.
        return {"aux_logits": False, "init_weights": True}
    return {}
