"""From a recipe to its sources: the one place that knows which kinds of data there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from app.data.preprocessing import alone
from app.errors import DataError
from app.tasks.image_classification.data.arrays import open_arrays, open_digits
from app.tasks.image_classification.data.cifar import download_cifar, open_cifar
from app.tasks.image_classification.data.decoded import decoded_once
from app.tasks.image_classification.data.fake import open_fake
from app.tasks.image_classification.data.folders import open_folder
from app.tasks.image_classification.data.hdf5 import open_hdf5
from app.tasks.image_classification.data.hub import download_hub, open_hub
from app.tasks.image_classification.data.idx import download_idx, open_idx
from app.tasks.image_classification.data.lmdb_file import open_lmdb
from app.tasks.image_classification.data.source import DOWNLOADS, Data, first_line
from app.tasks.image_classification.data.stage import located, staged
from app.tasks.image_classification.data.tar_shards import open_tar_shards
from app.tasks.image_classification.data.tfrecords import open_tfrecords
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
    "webdataset": open_tar_shards,
    "hdf5": open_hdf5,
    "lmdb": open_lmdb,
    "tfrecord": open_tfrecords,
}
"""The functions that open all splits, by data.source. They raise RecipeError for a missing key, and DataError for data
that is missing, unreadable or wrong."""
DOWNLOAD_FILES = {"mnist": download_idx, "fashion_mnist": download_idx, "cifar10": download_cifar, "cifar100": download_cifar}


def open_data(recipe: Sections) -> Data:
    """Return the splits that a recipe asks for, from the node's own disk if it says so. Never touches the network.

    Raises DataError if the data is missing, unreadable, or not what the recipe says, and RecipeError if the recipe lacks a key.
    """
    return open_staged(staged(recipe))


def open_staged(recipe: Sections) -> Data:
    """Return the splits from where `staged` said that they are. Raises DataError and RecipeError as `open_data`."""
    return open_undecoded(recipe).changed(decoded_once)


def open_undecoded(recipe: Sections) -> Data:
    """Return the same with no picture decoded yet that the opening itself does not need. Raises as `open_staged`."""
    return OPEN[recipe.data.source](recipe)


def open_stored(recipe: Sections) -> Data:
    """Return the same splits with their pictures as they are stored: what `reader_of` reads is not brought to a size."""
    data = located(recipe).data
    needs_size = data.source in ("imagefolder", "fakedata")  # the first for its batches, which nobody asks for here
    size = (data.image_size or 1) if needs_size else None
    augment = replace(recipe.augment, resized_crop_min_area=None)
    as_they_are = replace(data, image_size=size, resize_size=None)
    stored = replace(recipe, data=as_they_are, augment=augment)
    return OPEN[data.source](stored)


def download_data(recipe: Sections) -> None:
    """Download what the recipe needs, allows (data.download) and this machine lacks; for one process of each node.

    Nodes that share a disk take turns: whoever comes second finds the files there. Kinds of data that cannot be downloaded
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
            with alone(root / ".download.lock"):
                DOWNLOAD_FILES[source](recipe)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"data.source={source} cannot be downloaded into {root}: {first_line(error)}. Without a "
                "network, copy the files here and set data.path to them"
            ) from error
