"""What every program of `python -m benchmarks` is given: the same data, model, optimizer settings and batches.

A `Task` is what the command asks of a process, as plain values; `Work` makes of it what the program needs, in its process.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from app.data import transfer
from app.errors import RecipeError
from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from app.tasks.image_classification import models
from app.tasks.image_classification.data.arrays import ArraySource
from app.tasks.image_classification.data.idx import FILES, UNSIGNED_BYTE
from app.tasks.image_classification.data.open import Data, open_data
from app.tasks.image_classification.data.split import Images
from benchmarks.figures import LINEAR
from benchmarks.meter import Meter, Workers

_CONVNET = ("model.name=convnet", "model.norm=identity", "model.channels=16,32", "model.hidden=256")
"""The small network of 409 thousand weights: its step is short enough that feeding and the loop show."""
_FOREVER_STEPS = 10**9


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process is asked to do."""

    program: str
    recipe: str
    """Name or path."""
    overrides: Sequence[str]
    """`key=value` of the recipe."""
    model: str
    """`linear`, `convnet` (the small one, see `load`), or a name as in the recipe's model.name."""
    folder: str
    """Where torchvision finds the data (`write_for_torchvision`), and where the process may write."""
    shape: Sequence[int]
    """Channels, height, width and classes of the data."""
    augmented: bool = False
    """Whether training images are changed as the recipe says."""
    epochs: int | None = None
    """Epochs until an evaluation and the end; None: trains until its meter ends the process."""
    synthetic_samples: int | None = None
    """Train on so many random images in memory instead of the recipe's data."""
    compiled: bool = False
    """Whether the hand-written loop compiles its model. What Samerun does is up to the preset's variables."""


@dataclass(frozen=True)
class Tally:
    """Counts what the worker processes of one do: a byte in a file each time."""

    path: Path
    owner: int

    def add(self) -> None:
        """Count once more, unless it is the owner's doing, as a check of the data is."""
        if os.getpid() != self.owner:
            with self.path.open("ab") as file:
                file.write(b".")

    def count(self) -> int:
        """Return how often it was counted."""
        return self.path.stat().st_size if self.path.exists() else 0


class Work:
    """What a program needs to do its task."""

    def __init__(self, task: Task, meter: Meter) -> None:
        self.task = task
        self._meter = meter
        self.channels, self.height, self.width, self.classes = task.shape
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    @cached_property
    def loaded(self) -> LoadedRecipe:
        """The recipe, without what the programs do not have in common."""
        task = self.task
        return load(task.recipe, task.overrides, model=task.model, augmented=task.augmented, epochs=task.epochs)

    @property
    def batch(self) -> int:
        """Samples in a step, over all processes."""
        return self.loaded.recipe.train.global_batch_size

    @cached_property
    def data(self) -> Data:
        """The splits, as the recipe opens them, or random ones."""
        samples = self.task.synthetic_samples
        if samples is None:
            return open_data(self.loaded.recipe.sections)
        generator, shape = np.random.default_rng(0), (samples, self.channels, self.height, self.width)
        images = generator.integers(256, size=shape, dtype=np.uint8)
        labels = generator.integers(self.classes, size=samples)
        source = ArraySource(Images(images), labels, tuple(map(str, range(self.classes))), "synthetic")
        return Data(source, None, source)

    def tensors(self, *, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole split, normalized: images float32 [N, C, H, W] and labels int64 [N]."""
        source = self.data.train if training else self.data.test
        assert isinstance(source, ArraySource)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self.statistics)
        images = torch.from_numpy(source.images.array.copy()).float().div_(255).sub_(mean).div_(std)
        return images, torch.from_numpy(source.labels)

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the pixels, scaled to 0..1."""
        return self.loaded.recipe.sections.data.mean, self.loaded.recipe.sections.data.std

    def model(self) -> nn.Module:
        """Return the model, on the CPU, with its forward passes counted."""
        model = self.uncounted_model()
        self.count(model)
        return model

    def uncounted_model(self) -> nn.Module:
        """Return the model, on the CPU; hand to `count` what becomes of it."""
        torch.manual_seed(self.loaded.recipe.seed)
        if self.task.model == LINEAR:
            return nn.Sequential(nn.Flatten(), nn.Linear(self.channels * self.height * self.width, self.classes))
        size = (self.height, self.width)
        return models.build(
            self.loaded.recipe.sections.model, channels=self.channels, image_size=size, num_classes=self.classes
        )

    def count(self, model: nn.Module) -> None:
        """Measure the steps of what is called in each of them: a compiled model has to be counted from outside."""
        self._meter.watch(model)

    def fed_by(self, workers: int) -> Tally:
        """Measure a program that so many worker processes feed, and return what they count their batches by."""
        tally = Tally(Path(self.task.folder, f"made-{os.getpid()}"), os.getpid())
        if workers:
            # torch's DataLoader asks each for two batches at a time; of Samerun's, more are on their way to the device.
            self._meter.expect(Workers(2 * workers + transfer.PLACES + 1, tally.count))
        return tally

    def optimizer(self, model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer as torch makes it, or with its fused kernel."""
        optim = self.loaded.recipe.optim
        if optim.name == "sgd":
            return torch.optim.SGD(
                model.parameters(),
                optim.lr,
                optim.momentum,
                nesterov=optim.nesterov,
                weight_decay=optim.weight_decay,
                fused=fused,
            )
        return torch.optim.AdamW(
            model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=fused
        )

    def dataset(self, *, training: bool, transform: Callable[..., Any] | None = None) -> Any:
        """Return torchvision's data set, with its usual transforms or those given."""
        from torchvision import datasets, transforms

        augment = self.loaded.recipe.sections.augment
        changes = []
        if training and self.task.augmented:
            changes.append(transforms.RandomCrop((self.height, self.width), padding=augment.crop_padding))
            changes.append(transforms.RandomHorizontalFlip(augment.flip))
        usual = transforms.Compose([*changes, transforms.ToTensor(), transforms.Normalize(*self.statistics)])
        return datasets.MNIST(self.task.folder, train=training, transform=transform or usual)

    def loaders(self) -> tuple[DataLoader, DataLoader]:
        """Return torch's loaders of torchvision's data set, in this process: that takes the least CPU time."""
        train, test = (self.dataset(training=training) for training in (True, False))
        return DataLoader(train, self.batch, shuffle=True, drop_last=True), DataLoader(test, self.batch)

    def epochs(self) -> Iterable[int]:
        """Count the epochs to train."""
        return itertools.count() if self.task.epochs is None else range(self.task.epochs)


def load(name: str, overrides: Sequence[str], *, model: str, augmented: bool, epochs: int | None = None) -> LoadedRecipe:
    """Return a recipe for a model, without what the programs do not have in common: see `--help` of the command."""
    length = f"train.steps={_FOREVER_STEPS}" if epochs is None else f"train.epochs={epochs}"
    common = ["optim.name=adamw", "optim.schedule=constant", "optim.warmup_epochs=null", "optim.clip_norm=null"]
    common += ["augment.label_smoothing=0", "train.ema_decay=null", "train.evaluate_every_epochs=0"]
    common.append("optim.weight_decay=0")  # ours spares biases and norms, which makes two groups of weights
    common += [length, *({LINEAR: (), "convnet": _CONVNET}.get(model, (f"model.name={model}",)))]
    if not augmented:
        common += ["augment.crop_padding=0", "augment.flip=0"]
    return recipe_file.load(name, recipe_file.replaced(common, overrides))


def shape_of(data: Data) -> tuple[int, int, int, int]:
    """Return channels, height, width and classes. Raises RecipeError for data that is no array in memory."""
    if not isinstance(data.train, ArraySource) or not isinstance(data.test, ArraySource):
        raise RecipeError(
            "what is compared with are loops over tensors in memory, and the recipe's data is decoded when it is needed: "
            "choose a recipe such as fashion_mnist."
        )
    return data.train.channels, *data.train.image_size, len(data.train.classes)


def write_for_torchvision(data: Data, folder: Path) -> None:
    """Write grey images as the files of which torchvision makes its MNIST, `folder`/MNIST/raw."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    sources = [source for source in data if isinstance(source, ArraySource)]  # as both are: see `shape_of`
    arrays = [part for source in sources for part in (source.images.array[:, 0], source.labels.astype(np.uint8))]
    for name, array in zip(FILES, arrays, strict=True):
        header = struct.pack(f">{1 + array.ndim}I", UNSIGNED_BYTE << 8 | array.ndim, *array.shape)
        (raw / name).write_bytes(header + array.tobytes())
