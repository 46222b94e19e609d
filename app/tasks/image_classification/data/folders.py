"""A folder of images: path/<split>/<class>/<image>, as torchvision's ImageFolder finds them, or path/<class>/<image>.

What is found, and in which order, is what ImageFolder finds, without what `app.data.data_files` leaves out. The paths are kept
in an array: as strings, a million paths would take hundreds of megabytes in every process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.data.data_files import BESIDE_FOLDERS, NotRead, subfolders, walk
from app.environment.topology import listed
from app.errors import DataError
from app.tasks.image_classification.data.decoding import IMAGE_SUFFIXES, content_of
from app.tasks.image_classification.data.images import (
    TEST_NAMES,
    VALIDATION_NAMES,
    Data,
    Images,
    NoSplitError,
    StoredImage,
    completed,
    data_path,
    each_split,
    same_classes,
    without_left_out,
)
from app.tasks.image_classification.sections import DataRecipe, Sections

_MOST_NAMED = 5


def open_folder(recipe: Sections) -> Data:
    """Open the splits: RGB (or data.color=gray), one class for each sub-folder.

    Class folders without a folder for each split around them are all for training.
    """
    data, root = recipe.data, data_path(recipe)
    if _is_flat(root, data):
        found = {"train": (root, _classes(root, "data.path"))}
    else:
        found = each_split(data, lambda name, key: (root / name, _classes(root / name, key)))
    classes = same_classes({str(folder): classes for folder, classes in found.values()})
    used = {folder.relative_to(root).parts[0] for folder, _ in found.values() if folder != root}
    unused = [name for name in subfolders(root) if name not in used] if used else []
    splits = without_left_out({split: _open_split(root, folder, classes) for split, (folder, _) in found.items()}, data)
    for images in splits.values():
        counts = np.bincount(images.labels, minlength=len(classes))  # type: ignore[arg-type]
        empty = [name for name, count in zip(classes, counts, strict=True) if not count]
        if empty:
            problem = f"{images.where}: there are no images in the class folder(s) {listed(empty, _MOST_NAMED)}"
            raise DataError("; ".join([problem, *images.not_read, "add images, or remove these folders from all splits"]))
    if unused:
        last, images = list(splits.items())[-1]
        note = f"{root}: no split of the recipe reads {listed(unused, _MOST_NAMED)}"
        splits[last] = replace(images, not_read=(*images.not_read, note))
    return completed(splits, recipe, classes=classes, channels=1 if data.color == "gray" else 3)


def _open_split(root: Path, folder: Path, classes: Sequence[str]) -> Images:
    files, labels, left_out = images_below(folder, classes)
    below = os.path.relpath(folder, root)
    return Images(
        read=functools.partial(_read, folder, files),
        size=len(files),
        labels=labels,
        where=str(folder),
        prefix="" if below == "." else f"{below}/",
        files=files,
        not_read=(f"{folder}: {left_out}",) if left_out else (),
    )


def _read(folder: Path, files: np.ndarray, places: Sequence[int]) -> Iterator[StoredImage]:
    for place in places:
        path = folder / os.fsdecode(files[place])
        yield StoredImage(content_of(path), str(path))


def _is_flat(root: Path, data: DataRecipe) -> bool:
    """Return True if the folder holds class folders: neither it nor a folder in it has one for a split."""
    usual = ("train", *VALIDATION_NAMES, *TEST_NAMES)
    if (data.train_split, data.validation_split, data.test_split) != ("train", None, None) or not root.is_dir():
        return False
    inner = [root / name for name in subfolders(root)]
    return bool(inner) and not any((place / name).exists() for place in (root, *inner) for name in usual)


def _classes(folder: Path, key: str) -> list[str]:
    """Return the names of the class folders, in the order that ImageFolder numbers them."""
    try:
        classes = subfolders(folder)
    except OSError as error:
        raise (NoSplitError if isinstance(error, FileNotFoundError) else DataError)(
            f"{folder} cannot be read ({error.strerror}); data.path must contain a folder for each split ({key} is its name), "
            "or a folder of images for each class"
        ) from error
    if not classes:
        raise DataError(f"{folder} contains no class folders; put images into {folder}/<class>/")
    return classes


def images_below(folder: Path, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray, NotRead]:
    """Return the images below `folder`/CLASS for each of the classes, and what is not one.

    The images are paths below `folder`, bytes [N], and labels, int64 [N]: places of their classes. Raises DataError if a folder
    cannot be read.
    """
    left_out = NotRead()
    if beside := next(walk(folder, "", left_out)).files:
        left_out[BESIDE_FOLDERS] += len(beside)
    paths: list[bytes] = []
    counts = []
    for name in classes:
        before = len(paths)
        for found in sorted(walk(folder, name, left_out)):
            for path in (f"{found.name}/{file}" for file in found.files):
                if path.lower().endswith(IMAGE_SUFFIXES):
                    paths.append(os.fsencode(path))
                else:
                    left_out.add_ending(path)
        counts.append(len(paths) - before)
    return np.array(paths, dtype=np.bytes_), np.repeat(np.arange(len(classes)), counts), left_out
