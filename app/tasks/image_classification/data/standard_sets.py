"""Data sets with a known name: the embedded digits, MNIST and Fashion-MNIST, CIFAR-10 and CIFAR-100, and made-up images."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.data.data_files import open_decompressed
from app.errors import DataError, RecipeError
from app.files import other_libraries
from app.tasks.image_classification.data.arrays import Mapped, Unstored, framed, in_array, keep, stamps
from app.tasks.image_classification.data.decoding import Framing
from app.tasks.image_classification.data.images import DOWNLOADS, Data, Images, StoredImage, fingerprint
from app.tasks.image_classification.sections import Sections

DOWNLOADABLE = ("mnist", "fashion_mnist", "cifar10", "cifar100")
IDX_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
"""Name of the folder that torchvision keeps each data set in."""
DEBIAN = {"mnist": "/usr/share/datasets/mnist", "fashion_mnist": "/usr/share/datasets/fashion-mnist"}
"""Folder of Debian's packages (dataset-fashion-mnist)."""
IDX_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_HEADERS = {1: struct.Struct(">II"), 3: struct.Struct(">IIII")}
"""Magic number and sizes at the beginning of an idx file, by dimensions. The type of the numbers, unsigned bytes, is 0x08."""
FAKE_FINGERPRINT_SAMPLES = 8
"""Images that the fingerprint of made-up data covers: fewer than of stored data, because each is computed."""


def open_digits(recipe: Sections) -> Data:
    """Open the embedded digits (digits.md): 1 channel, 8x8 pixels, 10 classes."""
    with other_libraries.array(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    images = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)[:, None]
    in_test = np.arange(len(labels)) % 5 == 4

    def split(name: str, rows: np.ndarray) -> Images:
        where = f"the {name} split of the embedded digits"
        found = in_array(Mapped(images[rows]), labels[rows].astype(np.int64), tuple("0123456789"), where)
        return framed(found, recipe=recipe, training=name == "train", made_of=["digits", name])

    return {"train": split("train", ~in_test), "test": split("test", in_test)}


# MNIST and Fashion-MNIST: idx files, plain or compressed, wherever they are stored. The format is numbers that give type and
# shape, then the bytes: http://yann.lecun.com/exdb/mnist/.


def _idx_folders(recipe: Sections) -> list[Path]:
    """Return the folders that are searched, best first."""
    root, name = Path(recipe.data.path or DOWNLOADS), recipe.data.source
    found = [root, root / IDX_FOLDERS[name] / "raw"]
    return found if recipe.data.path else [*found, Path(DEBIAN[name])]


def _find_idx(recipe: Sections) -> list[Path] | None:
    """Return the four files, in the order of IDX_FILES, from the first folder that has them all; None if none has."""
    for folder in _idx_folders(recipe):
        candidates = [[path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in IDX_FILES]
        if all(candidates):
            return [paths[0] for paths in candidates]
    return None


def open_idx(recipe: Sections) -> Data:
    """Open the four files from the first of the usual places that has them: 1 channel, 10 classes."""
    name, files = recipe.data.source, _find_idx(recipe)
    if files is None:
        places = ", ".join(map(str, _idx_folders(recipe)))
        raise DataError(
            f"data.source={name}: no folder contains all four files ({', '.join(IDX_FILES)}; .gz or not). Looked in: {places}. "
            "Set data.path to the folder with these files, or set data.download=true"
        )

    def split(which: str, images: Path, labels: Path) -> Images:
        made_of = stamps([images, labels])

        def read() -> Unstored:
            pixels, targets = _read_idx(images, 3), _read_idx(labels, 1)
            if len(pixels) != len(targets):
                found = f"{images} holds {len(pixels)} images, but {labels} holds {len(targets)} labels"
                raise DataError(f"{found}; replace the files")
            return Unstored((len(pixels), 1, *pixels.shape[1:]), [pixels[:, None]], targets, IDX_CLASSES[name])

        found = replace(keep(made_of, made_of[0][1], read), where=f"the {which} split of {images.parent}")
        return framed(found, recipe=recipe, training=which == "train", made_of=made_of)

    return {"train": split("train", *files[:2]), "test": split("test", *files[2:])}


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the array, uint8, in an idx file with this number of dimensions. Raises DataError."""
    with open_decompressed(path) as file:
        content = file.read()
    header, magic = _HEADERS[dimensions], 0x0800 | dimensions
    if len(content) < header.size or header.unpack_from(content)[0] != magic:
        found = f"it starts with 0x{content[:4].hex()}, not 0x{magic:08x}"
        raise DataError(f"{path} is not an idx file with {dimensions} dimension(s): {found}; replace the file")
    shape, data_bytes = header.unpack_from(content)[1:], len(content) - header.size
    if data_bytes != math.prod(shape):
        wanted = "x".join(map(str, shape))
        raise DataError(f"{path} holds {data_bytes} bytes of data, but its header states {wanted}; replace the file")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(shape)


# CIFAR-10 and CIFAR-100: the python version's folder, read by torchvision once its checksums are right.


def open_cifar(recipe: Sections) -> Data:
    """Open CIFAR's folder: 3 channels, 32x32 pixels, 10 or 100 (fine) classes."""
    kind, root = _torchvision_class(recipe)
    folder = root / kind.base_folder

    def read(training: bool) -> Unstored:
        try:
            dataset = kind(root, train=training)
        except RuntimeError as error:  # a file is missing, or its checksum differs
            raise DataError(
                f"data.source={recipe.data.source}: {folder} is missing or damaged. Unpack {kind.filename} into {root}, set "
                "data.path to the folder that contains the unpacked one, or set data.download=true"
            ) from error
        images = dataset.data.transpose(0, 3, 1, 2)
        return Unstored(images.shape, [np.ascontiguousarray(images)], np.array(dataset.targets), tuple(dataset.classes))

    def split(name: str, names: Sequence[tuple[str, str]]) -> Images:
        training = name == "train"
        files = [folder / file for file, _ in [*names, (kind.meta["filename"], "")]]
        made_of = stamps([file for file in files if file.exists()])
        kept = keep(made_of, sum(size for _, size, _ in made_of), lambda: read(training))
        found = replace(kept, where=f"the {name} split of {folder}")
        return framed(found, recipe=recipe, training=training, made_of=made_of)

    return {"train": split("train", kind.train_list), "test": split("test", kind.test_list)}


def download_files(recipe: Sections) -> None:
    """Download the files of a DOWNLOADABLE source with torchvision, unless they exist. Raises OSError or RuntimeError."""
    kind, root = _torchvision_class(recipe)
    if recipe.data.source not in IDX_FOLDERS or _find_idx(recipe) is None:
        kind(root, download=True)


def _torchvision_class(recipe: Sections) -> tuple[Any, Path]:
    """Return torchvision's class, and the folder that holds the unpacked folder; for CIFAR data.path may name either."""
    from torchvision import datasets  # not at the top: it takes a second or two

    kinds = (datasets.MNIST, datasets.FashionMNIST, datasets.CIFAR10, datasets.CIFAR100)
    kind: Any = dict(zip(DOWNLOADABLE, kinds, strict=True))[recipe.data.source]
    path = Path(recipe.data.path or DOWNLOADS)
    return kind, path.parent if recipe.data.source not in IDX_FOLDERS and path.name == kind.base_folder else path


# Made-up images of any size, for measuring speed without data: the images and labels of torchvision's FakeData. They are
# computed here for two reasons. Its `__getitem__` seeds torch's global generators, and puts back only the CPU's: on a GPU,
# dropout would repeat itself with every sample. And it casts negative floats to uint8, which C++ leaves open; here they wrap
# around on every processor.


def open_fake(recipe: Sections) -> Data:
    """Make up the splits by data.fake_channels, data.image_size and data.fake_classes."""
    data, side = recipe.data, recipe.data.image_size
    if side is None:
        raise RecipeError("data.source=fakedata needs data.image_size: the side in pixels of the generated images")
    shape, classes = (data.fake_channels, side, side), tuple(str(label) for label in range(data.fake_classes))

    def split(name: str, size: int, offset: int) -> Images:
        read = functools.partial(_fake, shape, len(classes), offset)

        def content(index: int) -> bytes:
            (sample,) = read([index])
            return np.asarray(sample.value).tobytes() + str(sample.label).encode()

        return Images(
            read=read,
            size=size,
            labels=None,
            classes=classes,
            where=f"the {name} split of fakedata",
            channels=shape[0],
            image_size=(side, side),
            framing=Framing.of(recipe, training=name == "train"),
            fingerprint=fingerprint(classes, size, content, samples=FAKE_FINGERPRINT_SAMPLES),
        )

    in_training = data.fake_train_samples
    return {"train": split("train", in_training, 0), "test": split("test", data.fake_test_samples, in_training)}


def _fake(shape: tuple[int, int, int], num_classes: int, offset: int, indices: Sequence[int]) -> Iterator[StoredImage]:
    """Make samples, each from its index alone; `offset` is added to seed it, since splits must not hold the same images."""
    for index in indices:
        generator = torch.Generator().manual_seed(index + offset)
        noise = torch.randn(shape, generator=generator)
        label = torch.randint(0, num_classes, (1,), generator=generator)
        yield StoredImage(noise.mul_(255).to(torch.int32).to(torch.uint8), f"sample {index}", int(label))
