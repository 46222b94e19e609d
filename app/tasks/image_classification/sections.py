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

    not_learnt: ClassVar = ("stage_to", "download")
    places: ClassVar = ("path",)

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
    validation_split: str | None = None
    """Name of the validation split, as for train_split. None: `val`, `valid` or `validation`, where there is one."""
    test_split: str | None = None
    """Name of the test split, as for train_split. None: `test`, where there is one."""
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
class Sections:
    """All that a recipe says of this task alone. Raises RecipeError for what cannot be."""

    why_neighbours: ClassVar = "augment.mixup and augment.cutmix mix pairs of neighbouring samples"
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
    def neighbours(self) -> int:
        """How many neighbouring samples are computed with together: every micro-batch holds whole groups of them."""
        return 2 if self.augment.mixes_pairs else 1

    @property
    def inputs(self) -> Mapping[str, str]:
        """Files and folders that have to be there before the run, each by its key; `~` and variables are not filled in."""
        path = self.data.path
        # A name of the hub looks like a relative path.
        is_name = self.data.source == "huggingface" and not Path(path or "").expanduser().is_absolute()
        return {} if path is None or is_name or self.data.download else {"data.path": path}


_RANGES: Mapping[str, Range] = {
    "data.image_size": POSITIVE, "data.resize_size": POSITIVE, "data.std": POSITIVE,
    "data.fake_train_samples": POSITIVE, "data.fake_test_samples": POSITIVE,
    "data.fake_classes": Range(2), "data.fake_channels": POSITIVE,
    "augment.crop_padding": NOT_NEGATIVE, "augment.resized_crop_min_area": Range(0, 1, open_low=True), "augment.flip": SHARE,
    "augment.randaugment_ops": NOT_NEGATIVE, "augment.randaugment_magnitude": Range(0, 10), "augment.erase": SHARE,
    "augment.mixup": NOT_NEGATIVE, "augment.cutmix": NOT_NEGATIVE, "augment.label_smoothing": SHARE,
    "model.channels": POSITIVE, "model.hidden": POSITIVE,
}  # fmt: skip


def _of_the_hub(data: DataRecipe) -> list[str]:
    problems = []
    if data.source != "huggingface" and (data.hub_config or data.hub_revision):
        problems.append(f"data.hub_config and data.hub_revision are for data.source=huggingface, and it is {data.source}")
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
    if data.jpeg_decoder == "reduced" and data.image_size is None:
        problems.append("data.jpeg_decoder=reduced needs data.image_size: the size in pixels that pictures are brought to")
    if len(data.mean) != len(data.std):
        problems.append(
            f"data.mean has {len(data.mean)} values and data.std {len(data.std)}: one per channel each, or one for all"
        )
    return problems
