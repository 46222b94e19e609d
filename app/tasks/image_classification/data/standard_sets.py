"""Data sets with a known name: the embedded digits, MNIST and Fashion-MNIST, CIFAR-10 and CIFAR-100, and made-up images."""

from __future__ import annotations

import functools
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
from app.tasks.image_classification.data.arrays import ArrayImages, Mapped, Unstored, chunk_rows, framed, in_array, keep, stamps
from app.tasks.image_classification.data.decoding import Framing
from app.tasks.image_classification.data.images import DOWNLOADS, Data, Images, Stored, fingerprint
from app.tasks.image_classification.sections import Sections

IDX_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
"""Name of the folder that torchvision keeps each data set in."""
DEBIAN = {"mnist": "/usr/share/datasets/mnist", "fashion_mnist": "/usr/share/datasets/fashion-mnist"}
"""Where Debian's packages put them (dataset-fashion-mnist)."""
IDX_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTE = 0x08  # the format's code for the type of the numbers
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

    return Data(split("train", ~in_test), None, split("test", in_test))


# MNIST and Fashion-MNIST: idx files, plain (which are mapped) or compressed, wherever they are stored. The format is four
# numbers that give type and shape, then the bytes: http://yann.lecun.com/exdb/mnist/.


def idx_folders(recipe: Sections) -> list[Path]:
    """Return the folders that are searched, best first."""
    root, name = Path(recipe.data.path or DOWNLOADS), recipe.data.source
    found = [root, root / IDX_FOLDERS[name] / "raw"]
    return found if recipe.data.path else [*found, Path(DEBIAN[name])]


def find_idx(recipe: Sections) -> list[Path] | None:
    """Return the four files, in the order of IDX_FILES, from the first folder that has them all; None if none has."""
    for folder in idx_folders(recipe):
        candidates = [[path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in IDX_FILES]
        if all(candidates):
            return [paths[0] for paths in candidates]
    return None


def open_idx(recipe: Sections) -> Data:
    """Open the four files from the first of the usual places that has them: 1 channel, 10 classes."""
    name, files = recipe.data.source, find_idx(recipe)
    if files is None:
        places = ", ".join(map(str, idx_folders(recipe)))
        raise DataError(
            f"data.source={name}: no folder contains all four files ({', '.join(IDX_FILES)}; .gz or not). Looked in: {places}. "
            "Set data.path to the folder with these files, or set data.download=true"
        )

    def split(which: str, images: Path, labels: Path) -> Images:
        found = _open_idx_split(images, labels, IDX_CLASSES[name], f"the {which} split of {images.parent}")
        return framed(found, recipe=recipe, training=which == "train", made_of=stamps([images, labels]))

    return Data(split("train", *files[:2]), None, split("test", *files[2:]))


def _open_idx_split(images: Path, labels: Path, classes: tuple[str, ...], where: str) -> ArrayImages:
    """Return a split, mapped: plain images from their file, compressed ones from where they are kept unpacked."""
    (count, height, width), targets = _idx_shape(images, 3), _idx_labels(labels)
    if count != len(targets):
        raise DataError(f"{images} holds {count} images, but {labels} holds {len(targets)} labels; replace the files")
    shape = (count, 1, height, width)
    if images.suffix != ".gz":
        return in_array(Mapped.of_file(images, _header_bytes(3), shape), targets, classes, where)
    kept = keep(stamps([images, labels]), shape, lambda: Unstored(shape, _unpacked(images, shape), targets, classes))
    return replace(kept, where=where)


def _idx_labels(path: Path) -> np.ndarray:
    """Return the numbers in an idx file of one dimension, uint8 [N]: mapped, or in memory if compressed. Raises DataError."""
    shape = _idx_shape(path, 1)
    if path.suffix != ".gz":
        return Mapped.of_file(path, _header_bytes(1), shape).array
    return np.concatenate([np.empty(0, np.uint8), *_unpacked(path, shape)])


def _idx_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Return the shape of the array in an idx file of unsigned bytes. Raises DataError, also for another file size."""
    header, magic = _header_bytes(dimensions), UNSIGNED_BYTE << 8 | dimensions
    with open_decompressed(path) as file:
        start = file.read(header)
        if len(start) < header or struct.unpack_from(">I", start)[0] != magic:
            found = f"it starts with 0x{start[:4].hex()}, not 0x{magic:08x}"
            raise DataError(f"{path} is not an idx file with {dimensions} dimension(s): {found}; replace the file")
    shape = struct.unpack_from(f">{dimensions}I", start, 4)
    if path.suffix != ".gz":
        _check_length(path, path.stat().st_size - header, shape)
    return shape


def _unpacked(path: Path, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the array of a compressed file in chunks, and check at the end that it has as many bytes as the header states."""
    rows, row_bytes, read_bytes = chunk_rows(shape), int(np.prod(shape[1:], dtype=np.int64)), 0
    with open_decompressed(path) as file:
        file.read(_header_bytes(1 if len(shape) == 1 else 3))
        for start in range(0, shape[0], rows):
            piece = file.read(min(rows, shape[0] - start) * row_bytes)
            read_bytes += len(piece)
            if len(piece) % row_bytes == 0:
                yield np.frombuffer(piece, np.uint8).reshape(-1, *shape[1:])
        while more := file.read(1 << 20):  # the last read is what checks the file's own checksum
            read_bytes += len(more)
    _check_length(path, read_bytes, shape)


def _check_length(path: Path, data_bytes: int, shape: tuple[int, ...]) -> None:
    if data_bytes != np.prod(shape, dtype=np.int64):
        wanted = "x".join(map(str, shape))
        raise DataError(f"{path} holds {data_bytes} bytes of data, but its header states {wanted}; replace the file")


def _header_bytes(dimensions: int) -> int:
    return 4 + 4 * dimensions


def download_idx(recipe: Sections) -> None:
    """Download the files with torchvision, unless they exist. Raises OSError or RuntimeError."""
    if find_idx(recipe) is None:
        from torchvision import datasets  # not at the top: it takes a second or two

        kind = {"mnist": datasets.MNIST, "fashion_mnist": datasets.FashionMNIST}[recipe.data.source]
        kind(recipe.data.path or DOWNLOADS, download=True)


# CIFAR-10 and CIFAR-100: the python version's folder, read by torchvision once its checksums are right.


def open_cifar(recipe: Sections) -> Data:
    """Open CIFAR's folder: 3 channels, 32x32 pixels, 10 or 100 (fine) classes."""
    kind, root = _cifar(recipe)
    folder = root / kind.base_folder
    if not folder.is_dir():
        raise DataError(
            f"data.source={recipe.data.source}: the folder {folder} does not exist. Unpack {kind.filename} into {root}, set "
            "data.path to the folder that contains the unpacked one, or set data.download=true"
        )

    def read(training: bool) -> Unstored:
        if damaged := _damaged(kind, folder):
            raise DataError(
                f"{folder}: {', '.join(damaged)} missing or damaged (the checksum differs); unpack {kind.filename} again, "
                "or remove the folder and set data.download=true"
            )
        dataset = kind(root, train=training)
        images = dataset.data.transpose(0, 3, 1, 2)
        return Unstored(images.shape, [np.ascontiguousarray(images)], np.array(dataset.targets), tuple(dataset.classes))

    def split(name: str, names: Sequence[tuple[str, str]]) -> Images:
        training = name == "train"
        files = [folder / file for file, _ in [*names, (kind.meta["filename"], "")]]
        made_of = stamps([file for file in files if file.exists()])
        kept = keep(made_of, [sum(size for _, size, _ in made_of)], lambda: read(training))
        found = replace(kept, where=f"the {name} split of {folder}")
        return framed(found, recipe=recipe, training=training, made_of=made_of)

    return Data(split("train", kind.train_list), None, split("test", kind.test_list))


def download_cifar(recipe: Sections) -> None:
    """Download and unpack the folder with torchvision, unless it exists and is whole. Raises OSError or RuntimeError."""
    kind, root = _cifar(recipe)
    if _damaged(kind, root / kind.base_folder):
        kind(root, download=True)


def _damaged(kind: Any, folder: Path) -> list[str]:
    from torchvision.datasets.utils import check_integrity

    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    return [name for name, md5 in files if not check_integrity(folder / name, md5)]


def _cifar(recipe: Sections) -> tuple[Any, Path]:
    """Return torchvision's class, and the folder that holds the unpacked folder; data.path may name either."""
    from torchvision import datasets  # not at the top: it takes a second or two

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[recipe.data.source]
    path = Path(recipe.data.path or DOWNLOADS)
    return kind, path.parent if path.name == kind.base_folder else path


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

    return Data(
        split("train", data.fake_train_samples, 0), None, split("test", data.fake_test_samples, data.fake_train_samples)
    )


def _fake(shape: tuple[int, int, int], num_classes: int, offset: int, indices: Sequence[int]) -> Iterator[Stored]:
    """Make samples, each from its index alone; `offset` is added to seed it, since splits must not hold the same images."""
    for index in indices:
        generator = torch.Generator().manual_seed(index + offset)
        noise = torch.randn(shape, generator=generator)
        label = torch.randint(0, num_classes, (1,), generator=generator)
        yield Stored(noise.mul_(255).to(torch.int32).to(torch.uint8), f"sample {index}", int(label))
