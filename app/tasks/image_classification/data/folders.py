"""A folder of images: path/<split>/<class>/<picture>, as torchvision's ImageFolder finds them, or path/<class>/<picture>.

What of a folder is data says `app.data.data_files`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from app.data.data_files import NotRead, read_folder
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.left_out import LeftOut, reading
from app.tasks.image_classification.data.listing import Listing, pictures_below
from app.tasks.image_classification.data.pictures import PictureSource, decode
from app.tasks.image_classification.data.source import Data, Source, fingerprint
from app.tasks.image_classification.data.split_names import TEST_NAMES, VALIDATION_NAMES, NoSplitError, each_split, sources
from app.tasks.image_classification.sections import DataRecipe, Sections

# Bytes of a picture's file that the fingerprint reads, beside the file's size.
FINGERPRINT_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class FileReader:
    """Reads the pictures of one split."""

    folder: Path
    files: Listing
    channels: int
    prefix: str = ""
    """What precedes a path below `folder` where it is told from data.path on."""

    @property
    def labels(self) -> np.ndarray:
        """int64 [N]."""
        return self.files.labels

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for index in indices:
            path = self.path(index)
            yield decode(path, channels=self.channels, name=str(path)), int(self.labels[index])

    def path(self, index: int) -> Path:
        """Return the path of a picture."""
        return self.folder / self.files.path(index)

    def name(self, index: int) -> str:
        """Return the path of a picture, from data.path on."""
        return self.prefix + self.files.path(index)

    def file(self, index: int) -> bytes:
        """Return a picture's file. Raises DataError if it cannot be read."""
        path = self.path(index)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); repair or remove it") from error

    def head(self, index: int) -> bytes:
        """Return what the fingerprint covers of a picture's file: its size and its first bytes."""
        path = self.path(index)
        try:
            with path.open("rb") as file:
                return str(path.stat().st_size).encode() + b":" + file.read(FINGERPRINT_BYTES)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); repair or remove it") from error


def open_folder(recipe: Sections) -> Data:
    """Open the splits: RGB (or data.color=gray), data.image_size pixels, one class for each sub-folder.

    Class folders without a folder for each split around them are all for training.
    """
    data = recipe.data
    if data.path is None or data.image_size is None:
        needed = {
            "data.path": (data.path, "the folder that contains a folder for each split"),
            "data.image_size": (data.image_size, "the side in pixels to resize pictures to (usually 224)"),
        }
        raise RecipeError(*(f"data.source=imagefolder needs {key}: {why}" for key, (value, why) in needed.items() if not value))
    root, left_out = Path(data.path), LeftOut(data)
    if _is_flat(root, data):
        train = _open_split(root, tuple(_classes(root, "data.path")), left_out, recipe=recipe, training=True)
        left_out.check_found()
        return Data(train, None, None)
    found = each_split(data, lambda name, key: (root / name, _classes(root / name, key)))
    (first, classes), *others = found.there
    for folder, other in others:
        if other != classes:
            raise DataError(_difference([first, folder], [classes, other]))

    def source(part: tuple[Path, list[str]], training: bool) -> Source:
        return _open_split(part[0], tuple(classes), left_out, recipe=recipe, training=training)

    opened = sources(found, source)
    left_out.check_found()
    return opened


def _is_flat(root: Path, data: DataRecipe) -> bool:
    """Whether the folder holds class folders: neither it nor a folder in it has one for a split."""
    usual = ("train", *VALIDATION_NAMES, *TEST_NAMES)
    if (data.train_split, data.validation_split, data.test_split) != ("train", None, None) or not root.is_dir():
        return False
    inner = [root / name for name in read_folder(root, "", NotRead()).folders]
    return bool(inner) and not any((place / name).exists() for place in (root, *inner) for name in usual)


def _classes(folder: Path, key: str) -> list[str]:
    """Return the names of the class folders, in the order that ImageFolder numbers them."""
    try:
        classes = read_folder(folder, "", NotRead()).folders
    except OSError as error:
        raise (NoSplitError if isinstance(error, FileNotFoundError) else DataError)(
            f"{folder} cannot be read ({error.strerror}); data.path must contain a folder for each split, and {key} is its name"
        ) from error
    if not classes:
        raise DataError(f"{folder} contains no class folders; put pictures into {folder}/<class>/")
    return classes


def _difference(folders: list[Path], classes: list[list[str]]) -> str:
    parts = []
    for here, there in ((0, 1), (1, 0)):
        only = sorted(set(classes[here]) - set(classes[there]))
        if only:
            parts.append(f"{listed(only, 5)} only in {folders[here]}")
    return f"the class folders of two splits differ: {'; '.join(parts)}. Both need the same class folders"


def _open_split(folder: Path, classes: tuple[str, ...], left_out: LeftOut, *, recipe: Sections, training: bool) -> Source:
    below, side = os.path.relpath(folder, recipe.data.path), recipe.data.image_size or 0
    prefix = "" if below == "." else f"{below}/"
    files = pictures_below(folder, classes)
    if left_out.names:
        rest = left_out.named(prefix + files.path(index) for index in range(len(files)))
        files = files.without(rest.gone) if len(rest.gone) else files
    empty = np.flatnonzero(np.bincount(files.labels, minlength=len(classes)) == 0)
    if empty.size:
        names = ", ".join(classes[index] for index in empty[:5])
        others = f" ({files.left_out})" if files.left_out else ""
        raise DataError(
            f"{folder}: there are no pictures in the class folder(s) {names}{others}; add pictures, or remove "
            "these folders from both splits"
        )
    reader = FileReader(folder, files, channels=1 if recipe.data.color == "gray" else 3, prefix=prefix)
    return PictureSource(
        read=reader,
        size=len(files),
        where=str(folder),
        classes=classes,
        channels=reader.channels,
        image_size=(side, side),
        framing=Framing.of(recipe, training=training),
        fingerprint=fingerprint(
            classes, len(files), reading(reader.head, reader.name), listing=[files.labels, files.names.data]
        ),
    )
