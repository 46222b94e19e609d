"""MNIST and Fashion-MNIST: idx files, plain or compressed, wherever they are kept. Plain ones are mapped where they lie.

The format is four numbers that say type and shape, then the bytes: http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from app.data.data_files import opened
from app.errors import DataError
from app.tasks.image_classification.data.arrays import open_array
from app.tasks.image_classification.data.kept import keep, stamps
from app.tasks.image_classification.data.source import DOWNLOADS, Data
from app.tasks.image_classification.data.split import Images, Split, Unstored, pictures_in_a_chunk
from app.tasks.image_classification.sections import Sections

FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
"""Name of the folder that torchvision keeps each one in."""
DEBIAN = {"mnist": "/usr/share/datasets/mnist", "fashion_mnist": "/usr/share/datasets/fashion-mnist"}
"""Where Debian's packages put them (dataset-fashion-mnist)."""
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTE = 0x08  # the format's code for the type of the numbers


def places(recipe: Sections) -> list[Path]:
    """Return the folders that are searched, best first."""
    name = recipe.data.source
    root = Path(recipe.data.path or DOWNLOADS)
    found = [root, root / FOLDERS[name] / "raw"]
    return found if recipe.data.path else [*found, Path(DEBIAN[name])]


def find(recipe: Sections) -> list[Path] | None:
    """Return the paths of the four files, in the order of FILES, from the first folder that has them all; None if none has."""
    for folder in places(recipe):
        found = [_existing(folder / name) for name in FILES]
        if None not in found:
            return [path for path in found if path]
    return None


def open_idx(recipe: Sections) -> Data:
    """Open the four files from the first of the usual places that has them: 1 channel, 10 classes."""
    name = recipe.data.source
    files = find(recipe)
    if files is None:
        raise DataError(
            f"data.source={name}: no folder contains all four files ({', '.join(FILES)}; .gz or not). Looked "
            f"in: {', '.join(str(place) for place in places(recipe))}. Set data.path to the folder with these "
            "files, or set data.download=true"
        )
    train, test = (
        open_array(
            _open_split(images, labels, CLASSES[name]),
            recipe=recipe,
            training=training,
            where=f"the {'train' if training else 'test'} split of {images.parent}",
            made_of=stamps([images, labels]),
        )
        for images, labels, training in ((files[0], files[1], True), (files[2], files[3], False))
    )
    return Data(train, None, test)


def _open_split(images: Path, labels: Path, classes: tuple[str, ...]) -> Split:
    """Return a split, mapped: plain pictures where they lie, compressed ones from where they are kept unpacked."""
    (count, height, width), targets = read_shape(images, 3), read_labels(labels)
    if count != len(targets):
        raise DataError(f"{images} holds {count} images, but {labels} holds {len(targets)} labels; replace the files")
    shape = (count, 1, height, width)
    if images.suffix != ".gz":
        return Split(Images.mapped(images, _header_bytes(3), shape), targets, classes)
    size_bytes = int(np.prod(shape, dtype=np.int64))
    return keep(stamps([images, labels]), size_bytes, lambda: Unstored(shape, _unpacked(images, shape), targets, classes))


def read_labels(path: Path) -> np.ndarray:
    """Return the numbers in an idx file of one dimension, uint8 [N]: mapped, or in memory if compressed. Raises DataError."""
    shape = read_shape(path, 1)
    if path.suffix != ".gz":
        return Images.mapped(path, _header_bytes(1), shape).array
    return np.concatenate([np.empty(0, np.uint8), *_unpacked(path, shape)])


def read_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Return the shape of the array in an idx file of unsigned bytes; a plain file must have so many. Raises DataError."""
    header, magic = _header_bytes(dimensions), UNSIGNED_BYTE << 8 | dimensions
    with opened(path) as file:
        start = file.read(header)
        if len(start) < header or struct.unpack_from(">I", start)[0] != magic:
            raise DataError(
                f"{path} is not an idx file with {dimensions} dimension(s): it starts with "
                f"0x{start[:4].hex()}, not 0x{magic:08x}; replace the file"
            )
    shape = struct.unpack_from(f">{dimensions}I", start, 4)
    if path.suffix != ".gz":
        _check_length(path, path.stat().st_size - header, shape)
    return shape


def _unpacked(path: Path, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the array of a compressed file in pieces, and check at its end that it has so many bytes."""
    rows, row_bytes, read_bytes = pictures_in_a_chunk(shape), int(np.prod(shape[1:], dtype=np.int64)), 0
    with opened(path) as file:
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
        raise DataError(
            f"{path} holds {data_bytes} bytes of data, but its header says {'x'.join(map(str, shape))}; replace the file"
        )


def _header_bytes(dimensions: int) -> int:
    return 4 + 4 * dimensions


def download_idx(recipe: Sections) -> None:
    """Download the files with torchvision, unless they are there. Raises OSError or RuntimeError."""
    if find(recipe) is None:
        from torchvision import datasets  # not at the top: it takes a second or two

        kind = {"mnist": datasets.MNIST, "fashion_mnist": datasets.FashionMNIST}[recipe.data.source]
        kind(recipe.data.path or DOWNLOADS, download=True)


def _existing(path: Path) -> Path | None:
    compressed = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, compressed) if candidate.is_file()), None)
