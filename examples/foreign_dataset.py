"""A third-party Dataset with its own random transforms: class folders of images, read by torchvision. The transforms draw from
the generator of Python, NumPy or torch: `Samples.of` seeds these for each sample, so an image gets the same transform in every
process."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from samerun import Loss, Samples, Scores

SIZE = 32  # pixels


@dataclass(frozen=True)
class Data:
    places = ("path",)
    path: str = "images"
    "Folder with train/ and val/, and in each of them a folder of images for each class."


@dataclass(frozen=True)
class Sections:
    data: Data = Data()


class Images:
    monitor = ("accuracy", "max")

    def __init__(self, sections):
        self.folder = Path(sections.data.path)

    def samples(self, split):
        if split == "validation":
            return None  # no folder: `train.validation_fraction` holds out some of the training samples
        random = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2)]
        changes = random if split == "train" else [v2.Resize((SIZE, SIZE))]
        to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        name = {"train": "train", "test": "val"}[split]
        images = ImageFolder(self.folder / name, transform=v2.Compose([*changes, *to_tensor]))
        return Samples.of(images, names=("images", "labels"), facts={"classes": images.classes})

    def model(self, metadata):
        first = [nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.GELU()]
        second = [nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.GELU()]
        return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(metadata["classes"])))

    def loss(self, model, batch):
        return Loss(cross_entropy(model(batch["images"]), batch["labels"]))

    def metrics(self, model, batch, valid):
        right = model(batch["images"]).argmax(1) == batch["labels"]
        return Scores.of({"accuracy": right}, valid)


task = Images
