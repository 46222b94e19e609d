"""The sections of a recipe that classifies pictures: where they are, how they are changed at random, and the network.

Each key, its default and its meaning (with the unit) stand below, as in `app/recipe/schema.py`; the ranges and what contradicts
what stand at the end. Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from app.errors import RecipeError
from app.recipe.ranges import NOT_NEGATIVE, POSITIVE, SHARE, Range, out_of_range
from app.tasks.image_classification import model_names


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
    """Kind of data. `digits` comes with the package; `huggingface` is anything that the `datasets` library opens; `arrays` is
    the format of `samerun data pack --to arrays`."""
    path: str | None = None
    """File, folder or hub name. `~` and variables are expanded. None: look in the usual places (`docs/data.md` lists them)."""
    leave_out: str | None = None
    """File with the names of samples to leave out, in the format of `samerun data check --write FILE` (imagefolder, huggingface
    and containers). Its content is part of what is learnt; its path is not. None: no sample."""
    hub_config: str | None = None
    """Configuration of the data set (huggingface), as the hub or the README.md of a folder names it. None: the only one."""
    hub_revision: str | None = None
    """Commit of the hub's data set (huggingface), all 40 digits. It pins the data. None: the newest."""
    stage_to: str | None = None
    """Folder on a local disk of the node, such as $SLURM_TMPDIR. data.path is copied there once, before training. None: no
    copy."""
    download: bool = False
    """Whether one process per node may download missing data."""
    train_split: str = "train"
    """Name of the training split: a sub-folder for imagefolder, a split for huggingface, the beginning of file names
    elsewhere."""
    validation_split: str | None = None
    """Name of the validation split, as for train_split. None: `val`, `valid` or `validation`, where there is one."""
    test_split: str | None = None
    """Name of the test split, as for train_split. None: `test`, where there is one."""
    image_column: str = "image"
    """Column, dataset or feature that holds the images (huggingface, hdf5, tfrecord)."""
    label_column: str = "label"
    """Column, dataset or feature that holds the labels (huggingface, hdf5, tfrecord)."""
    color: Literal["auto", "rgb", "gray"] = "auto"
    """Color mode that picture files are decoded to. auto: RGB; for huggingface gray, if all of a sample of pictures are
    gray."""
    image_size: int | None = None
    """Side of the square image that the model gets, in pixels. None: as stored, for data whose images all have one size."""
    resize_size: int | None = None
    """In evaluation: the shorter side is resized to so many pixels before the centre crop to image_size. None: image_size."""
    mean: tuple[float, ...] = (0.5,)
    """Mean that is subtracted from pixel values scaled to 0..1: one per channel, or one for all."""
    std: tuple[float, ...] = (0.25,)
    """Standard deviation that pixel values are divided by after the mean is subtracted: one per channel, or one for all."""
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
    """Random resized crop: the smallest share of the area that it keeps (0.08 is usual on ImageNet). None: no such crop."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    randaugment_ops: int = 0
    """Number of RandAugment operations applied to each image."""
    randaugment_magnitude: float = 9.0
    """RandAugment magnitude, 0..10 as in the paper. torchvision's default, 9 of 31 steps, is 3 here."""
    erase: float = 0.0
    """Probability of erasing a random rectangle."""
    mixup: float = 0.0
    """Alpha of the Beta distribution from which mixup draws its weights. 0: off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution from which cutmix draws its areas. 0: off. With mixup also on, each pair gets one of the
    two."""
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
    """`convnet`, or the name of any torchvision classification model (resnet18, vit_b_16, ...)."""
    norm: Literal["group", "batch", "identity"] = "group"
    """Normalization of the convnet; identity: none. Batch statistics depend on the micro-batch size, group statistics do
    not."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of the convnet. gelu with average pooling is smooth: it has no kinks where rounding could change a
    gradient."""
    pooling: Literal["max", "average"] = "max"
    """How the convnet halves the image."""
    channels: tuple[int, int] = (32, 64)
    """Output channels of the convnet's two convolutions."""
    hidden: int = 128
    """Width of the convnet's hidden linear layer, in units."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All that a recipe says of this task alone. Raises RecipeError for what cannot be."""

    why_grouped: ClassVar[str] = "augment.mixup and augment.cutmix mix pairs of neighbouring samples"
    data: DataRecipe = field(default_factory=DataRecipe)
    augment: AugmentRecipe = field(default_factory=AugmentRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)

    def __post_init__(self) -> None:
        problems = [*out_of_range(self, _RANGES), *_of_the_hub(self.data), *_contradictions(self)]
        if problem := model_names.problem(self.model.name):
            problems.append(problem)
        if problems:
            raise RecipeError(*problems)

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


_RANGES: Mapping[str, Range] = {
    "data.image_size": POSITIVE, "data.resize_size": POSITIVE, "data.std": POSITIVE,
    "data.fake_train_samples": POSITIVE, "data.fake_test_samples": POSITIVE,
    "data.fake_classes": Range(2), "data.fake_channels": POSITIVE,
    "augment.crop_padding": NOT_NEGATIVE, "augment.resized_crop_min_area": Range(0, 1, open_low=True), "augment.flip": SHARE,
    "augment.randaugment_ops": NOT_NEGATIVE, "augment.randaugment_magnitude": Range(0, 10), "augment.erase": SHARE,
    "augment.mixup": NOT_NEGATIVE, "augment.cutmix": NOT_NEGATIVE, "augment.label_smoothing": SHARE,
    "model.channels": POSITIVE, "model.hidden": POSITIVE,
}  # fmt: skip


_DECODED = ("imagefolder", "huggingface", "webdataset", "hdf5", "lmdb", "tfrecord")


def _of_the_hub(data: DataRecipe) -> list[str]:
    problems = []
    if data.source != "huggingface" and (data.hub_config or data.hub_revision):
        problems.append(
            f"data.hub_config and data.hub_revision are for data.source=huggingface, and data.source is {data.source}"
        )
    if data.hub_revision is not None and not re.fullmatch("[0-9a-f]{40}", data.hub_revision):
        problems.append(
            f"data.hub_revision is {data.hub_revision}: it must be a commit, all 40 hexadecimal digits of it, because branches "
            "and tags move (the hub shows it under Files and versions)"
        )
    return problems


def _contradictions(sections: Sections) -> list[str]:
    data, augment = sections.data, sections.augment
    problems = []
    if augment.resized_crop_min_area is not None and data.image_size is None:
        problems.append("augment.resized_crop_min_area needs data.image_size: the size in pixels that crops are resized to")
    if data.resize_size is not None and data.image_size is None:
        problems.append("data.resize_size needs data.image_size: the size in pixels of the centre crop")
    if data.resize_size is not None and data.image_size is not None and data.resize_size < data.image_size:
        problems.append(f"data.resize_size is {data.resize_size}: it must be at least data.image_size, {data.image_size}")
    if data.leave_out is not None and data.source not in _DECODED:
        problems.append(
            f"data.leave_out is for data.source={', '.join(_DECODED)}: {data.source} has no files that could be left out"
        )
    if len(data.mean) != len(data.std):
        problems.append(
            f"data.mean has {len(data.mean)} values and data.std {len(data.std)}: give each one value per "
            "channel, or one for all"
        )
    return problems
