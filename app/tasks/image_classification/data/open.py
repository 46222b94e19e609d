"""From a recipe to its data: the one place that knows which kinds of data there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.data.preprocessing import one_process_per_node
from app.errors import DataError
from app.tasks.image_classification.data.arrays import decoded_once, open_arrays
from app.tasks.image_classification.data.containers import open_hdf5, open_lmdb
from app.tasks.image_classification.data.folders import open_folder
from app.tasks.image_classification.data.hub import download_hub, open_hub
from app.tasks.image_classification.data.images import DOWNLOADS, Data, first_line
from app.tasks.image_classification.data.shards import open_tfrecords, open_webdataset
from app.tasks.image_classification.data.stage import located, staged
from app.tasks.image_classification.data.standard_sets import (
    download_cifar,
    download_idx,
    open_cifar,
    open_digits,
    open_fake,
    open_idx,
)
from app.tasks.image_classification.sections import Sections

OPEN: Mapping[str, Callable[[Sections], Data]] = {
    "digits": open_digits,
    "mnist": open_idx,
    "fashion_mnist": open_idx,
    "cifar10": open_cifar,
    "cifar100": open_cifar,
    "imagefolder": open_folder,
    "fakedata": open_fake,
    "huggingface": open_hub,
    "arrays": open_arrays,
    "webdataset": open_webdataset,
    "hdf5": open_hdf5,
    "lmdb": open_lmdb,
    "tfrecord": open_tfrecords,
}
"""The functions that open all splits, by data.source. They raise RecipeError for a missing key, and DataError for data
that is missing, unreadable or wrong."""
DOWNLOAD_FILES = {"mnist": download_idx, "fashion_mnist": download_idx, "cifar10": download_cifar, "cifar100": download_cifar}
_NAMED = 5
"""Classes that a note names."""


def open_data(recipe: Sections) -> Data:
    """Return the splits that a recipe asks for, from the node's own disk if it says so. Never touches the network.

    Raises DataError if the data is missing, unreadable, or not what the recipe says, and RecipeError if the recipe lacks a key.
    """
    return open_staged(staged(recipe))


def open_staged(recipe: Sections) -> Data:
    """Return the splits from where `staged` has put them. Raises DataError and RecipeError as `open_data`."""
    return open_undecoded(recipe).changed(decoded_once)


def open_undecoded(recipe: Sections) -> Data:
    """Return the splits without decoding images that are not needed to open them. Raises as `open_staged`."""
    return OPEN[recipe.data.source](recipe)


def open_stored(recipe: Sections) -> Data:
    """Return the splits with their images as they are stored: not resized."""
    data = located(recipe).data
    needs_size = data.source in ("imagefolder", "fakedata")  # the first for its batches, which are not used here
    size = (data.image_size or 1) if needs_size else None
    augment = replace(recipe.augment, resized_crop_min_area=None)
    return open_undecoded(replace(recipe, data=replace(data, image_size=size, resize_size=None), augment=augment))


def download_data(recipe: Sections) -> None:
    """Download what the recipe needs, allows (data.download) and this machine lacks; for one process of each node.

    Nodes that share a disk take turns: the second one finds the files. Kinds of data that cannot be downloaded
    are left to `open_data` to find or miss. Raises DataError if it cannot be downloaded, RecipeError if a key is missing.
    """
    recipe = located(recipe)
    source, root = recipe.data.source, Path(recipe.data.path or DOWNLOADS)
    if not recipe.data.download:
        return
    if source == "huggingface":
        download_hub(recipe)
    elif source in DOWNLOAD_FILES:
        try:
            with one_process_per_node(root / ".download.lock"):
                DOWNLOAD_FILES[source](recipe)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"data.source={source} cannot be downloaded into {root}: {first_line(error)}. Without a "
                "network, copy the files here and set data.path to them"
            ) from error


def notes_on(data: Data) -> list[str]:
    """Return a sentence for each thing that may not be intended: classes without a training sample, and what is not read."""
    train, notes = data.train, []
    if not isinstance(train, DataError) and train.labels is not None:
        empty = np.flatnonzero(np.bincount(train.labels, minlength=len(train.classes)) == 0)
        if empty.size:
            named = ", ".join(repr(train.classes[index]) for index in empty[:_NAMED])
            text = (
                f"{empty.size} of the {len(train.classes)} classes have no training samples "
                f"({named}{' and others' if empty.size > _NAMED else ''}), but the model has an output for each"
            )
            if train.classes == tuple(map(str, range(len(train.classes)))):
                text += (
                    ": integer labels stand for the classes 0 to the largest label. Number classes from 0 without gaps, "
                    "or name them"
                )
            notes.append(text)
    return notes + not_read(data)


def not_read(data: Data) -> list[str]:
    """Return a sentence for each folder of the data in which there is something that is not read."""
    return [note for images in data.there.values() for note in images.not_read]
