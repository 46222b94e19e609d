"""MNIST and Fashion-MNIST: idx files, plain or compressed, wherever they are kept.

The format is four numbers that say type and shape, then the bytes: http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from app.data.arrays import open_array
from app.data.source import DOWNLOADS, Source
from app.errors import DataError
from app.recipe import Recipe

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


def places(recipe: Recipe) -> list[Path]:
    """Return the folders that are searched, best first."""
    name = recipe.data.source
    root = Path(recipe.data.path or DOWNLOADS)
    found = [root, root / FOLDERS[name] / "raw"]
    return found if recipe.data.path else [*found, Path(DEBIAN[name])]


def find(recipe: Recipe) -> list[Path] | None:
    """Return the paths of the four files, in the order of FILES, from the first folder that has them all; None if none has."""
    for folder in places(recipe):
        found = [_existing(folder / name) for name in FILES]
        if None not in found:
            return [path for path in found if path]
    return None


def open_idx(recipe: Recipe) -> tuple[Source, Source]:
    """Return the training and the test split: 1 channel, 10 classes.

    Raises:
        DataError: The files are in none of the usual places, or one of them is not what it should be.
    """
    name = recipe.data.source
    files = find(recipe)
    if files is None:
        raise DataError(
            f"data.source={name}: no folder has all four of its files ({', '.join(FILES)}; .gz or not). "
            f"Looked in: {', '.join(str(place) for place in places(recipe))}. "
            "Point data.path at the folder that has them, or set data.download=true"
        )
    train, test = (
        open_array(*_read_split(images, labels), CLASSES[name], recipe=recipe, training=training, origin=str(images.parent))
        for images, labels, training in ((files[0], files[1], True), (files[2], files[3], False))
    )
    return train, test


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the array in an idx file of unsigned bytes: uint8, with that many dimensions.

    Raises:
        DataError: The file cannot be read, is no such file, or is shorter or longer than it says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); replace the file") from error
    header = 4 + 4 * dimensions
    magic = UNSIGNED_BYTE << 8 | dimensions
    if len(content) < header or struct.unpack_from(">I", content)[0] != magic:
        raise DataError(
            f"{path} is not an idx file of {dimensions} dimension(s): it starts with 0x{content[:4].hex()}, "
            f"not 0x{magic:08x}; replace the file"
        )
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - header != np.prod(shape, dtype=np.int64):
        raise DataError(
            f"{path} holds {len(content) - header} bytes of data, but its header says {'x'.join(map(str, shape))}; "
            "replace the file"
        )
    return np.array(np.frombuffer(content, np.uint8, offset=header).reshape(shape))  # a copy: torch wants memory it may write


def download_idx(recipe: Recipe) -> None:
    """Download the files with torchvision, unless they are there.

    Raises:
        OSError, RuntimeError: They cannot be downloaded.
    """
    if find(recipe) is None:
        from torchvision import datasets  # not at the top: it takes a second or two

        kind = {"mnist": datasets.MNIST, "fashion_mnist": datasets.FashionMNIST}[recipe.data.source]
        kind(recipe.data.path or DOWNLOADS, download=True)


def _existing(path: Path) -> Path | None:
    compressed = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, compressed) if candidate.is_file()), None)


def _read_split(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    pictures, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pictures) != len(targets):
        raise DataError(f"{images} holds {len(pictures)} images, but {labels} {len(targets)} labels; replace the files")
    return pictures[:, None], targets
