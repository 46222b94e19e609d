"""A folder of images: path/<split>/<class>/<picture>, as torchvision's ImageFolder finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from app.errors import DataError, RecipeError
from app.place.topology import listed
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.listing import Listing, counted, pictures_below
from app.tasks.image_classification.data.pictures import PictureSource, decode
from app.tasks.image_classification.data.source import Source, fingerprint
from app.tasks.image_classification.sections import Sections

# Bytes of a picture's file that the fingerprint reads, beside the file's size.
FINGERPRINT_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class FileReader:
    """Reads the pictures of one split."""

    folder: Path
    files: Listing
    channels: int

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

    def file(self, index: int) -> bytes:
        """Return a picture's file. Raises DataError if it cannot be read."""
        path = self.path(index)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); mend it or leave it out") from error

    def head(self, index: int) -> bytes:
        """Return what the fingerprint covers of a picture's file: its size and its first bytes."""
        path = self.path(index)
        try:
            with path.open("rb") as file:
                return str(path.stat().st_size).encode() + b":" + file.read(FINGERPRINT_BYTES)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); mend it or leave it out") from error


def open_folder(recipe: Sections) -> tuple[Source, Source]:
    """Open both splits: RGB (or data.color=gray), data.image_size pixels, one class for each sub-folder."""
    data = recipe.data
    if data.path is None or data.image_size is None:
        needed = {
            "data.path": (data.path, "the folder that holds a folder for each split"),
            "data.image_size": (data.image_size, "the side in pixels that pictures are brought to (224 is usual)"),
        }
        raise RecipeError(*(f"data.source=imagefolder needs {key}: {why}" for key, (value, why) in needed.items() if not value))
    root = Path(data.path)
    folders = [root / data.train_split, root / data.test_split]
    classes = [_classes(folder, key) for folder, key in zip(folders, ("data.train_split", "data.test_split"), strict=True)]
    if classes[0] != classes[1]:
        raise DataError(_difference(folders, classes))
    train, test = (
        _open_split(folder, tuple(classes[0]), data.image_size, recipe=recipe, training=training)
        for folder, training in zip(folders, (True, False), strict=True)
    )
    return train, test


def _classes(folder: Path, key: str) -> list[str]:
    """Return the names of the class folders, in the order that ImageFolder numbers them."""
    try:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({error.strerror}); data.path must hold a folder for each split, and {key} name it"
        ) from error
    if not classes:
        raise DataError(f"{folder} holds no class folders; pictures belong in {folder}/<class>/")
    return classes


def _difference(folders: list[Path], classes: list[list[str]]) -> str:
    parts = []
    for here, there in ((0, 1), (1, 0)):
        only = sorted(set(classes[here]) - set(classes[there]))
        if only:
            parts.append(f"{listed(only, 5)} only in {folders[here]}")
    return f"the class folders of the two splits differ: {'; '.join(parts)}. Give both the same class folders"


def _open_split(folder: Path, classes: tuple[str, ...], side: int, *, recipe: Sections, training: bool) -> Source:
    files = pictures_below(folder, classes)
    empty = np.flatnonzero(np.bincount(files.labels, minlength=len(classes)) == 0)
    if empty.size:
        names = ", ".join(classes[index] for index in empty[:5])
        others = f" (files of other kinds: {counted(files.left_out)})" if files.left_out else ""
        raise DataError(
            f"{folder}: no picture in the class folder(s) {names}{others}; fill them or remove them from both splits"
        )
    reader = FileReader(folder, files, channels=1 if recipe.data.color == "gray" else 3)
    return PictureSource(
        read=reader,
        size=len(files),
        where=str(folder),
        classes=classes,
        channels=reader.channels,
        image_size=(side, side),
        framing=Framing.of(recipe, training=training),
        fingerprint=fingerprint(classes, len(files), reader.head, listing=[files.labels, files.names.data]),
    )
