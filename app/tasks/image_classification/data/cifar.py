"""CIFAR-10 and CIFAR-100: the python version's folder, read by torchvision once its checksums are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.tasks.image_classification.data.arrays import open_array
from app.tasks.image_classification.data.kept import keep, stamps
from app.tasks.image_classification.data.source import DOWNLOADS, Data, Source
from app.tasks.image_classification.data.split import Unstored
from app.tasks.image_classification.sections import Sections


def open_cifar(recipe: Sections) -> Data:
    """Open CIFAR's folder: 3 channels, 32x32 pixels, 10 or 100 (fine) classes."""
    kind, root = _kind(recipe), _root(recipe)
    folder = root / kind.base_folder
    if not folder.is_dir():
        raise DataError(
            f"data.source={recipe.data.source}: the folder {folder} does not exist. Unpack {kind.filename} "
            f"into {root}, set data.path to the folder that contains the unpacked one, or set "
            "data.download=true"
        )
    train, test = (_split(kind, root, recipe=recipe, training=training) for training in (True, False))
    return Data(train, None, test)


def download_cifar(recipe: Sections) -> None:
    """Download and unpack the folder with torchvision, unless it is there and whole. Raises OSError or RuntimeError."""
    kind, root = _kind(recipe), _root(recipe)
    if _damaged(kind, root / kind.base_folder):
        kind(root, download=True)


def _split(kind: Any, root: Path, *, recipe: Sections, training: bool) -> Source:
    folder = root / kind.base_folder
    files = [folder / name for name, _ in [*(kind.train_list if training else kind.test_list), (kind.meta["filename"], "")]]
    made_of = stamps([file for file in files if file.exists()])
    size_bytes = sum(size for _, size, _ in made_of)
    split = keep(made_of, size_bytes, lambda: _read(kind, root, training=training))
    where = f"the {'train' if training else 'test'} split of {folder}"
    return open_array(split, recipe=recipe, training=training, where=where, made_of=made_of)


def _read(kind: Any, root: Path, *, training: bool) -> Unstored:
    """Read a split whose checksums are right. Raises DataError for a file that is missing or damaged."""
    folder = root / kind.base_folder
    damaged = _damaged(kind, folder)
    if damaged:
        raise DataError(
            f"{folder}: {', '.join(damaged)} missing or damaged (the checksum differs); unpack {kind.filename} again, "
            "or remove the folder and set data.download=true"
        )
    dataset = kind(root, train=training)
    images = dataset.data.transpose(0, 3, 1, 2)
    return Unstored(images.shape, [np.ascontiguousarray(images)], np.array(dataset.targets), tuple(dataset.classes))


def _damaged(kind: Any, folder: Path) -> list[str]:
    from torchvision.datasets.utils import check_integrity

    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    return [name for name, md5 in files if not check_integrity(folder / name, md5)]


def _root(recipe: Sections) -> Path:
    """Return the folder that holds the unpacked folder; data.path may name either."""
    path = Path(recipe.data.path or DOWNLOADS)
    return path.parent if path.name == _kind(recipe).base_folder else path


def _kind(recipe: Sections) -> Any:
    from torchvision import datasets  # not at the top: it takes a second or two

    return {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[recipe.data.source]
