"""Opens the data of a recipe: the one place that knows which kinds of data there are, and where they are on this machine.

With `data.stage_to` one process of a node copies `data.path` before training, while the others wait; nodes copy in parallel. A
copy is named by a hash of all files' names, sizes and dates: of unchanged data the next run finds it, of changed data another
is made. Copies are in a folder that only this user can use: a node's disk is often everybody's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from app.data.data_files import NotRead, first_line, reading, regular_file, walk
from app.data.preprocessing import one_process_per_node, own_folder, progress
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.files import text_files
from app.tasks.image_classification.data.arrays import decoded_once, made_once, open_arrays
from app.tasks.image_classification.data.containers import open_hdf5, open_lmdb
from app.tasks.image_classification.data.folders import open_folder
from app.tasks.image_classification.data.hub import download_hub, open_hub
from app.tasks.image_classification.data.images import DOWNLOADS, Data, Images, open_containers
from app.tasks.image_classification.data.shards import open_tfrecords, open_webdataset
from app.tasks.image_classification.data.standard_sets import (
    DOWNLOADABLE,
    download_files,
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
    "webdataset": partial(open_containers, open_webdataset),
    "hdf5": partial(open_containers, open_hdf5),
    "lmdb": partial(open_containers, open_lmdb),
    "tfrecord": partial(open_containers, open_tfrecords),
}
"""The functions that open all splits, by data.source. They raise RecipeError for a missing key, and DataError for data
that is missing, unreadable or wrong."""
_COPIERS = 8
"""Files copied at a time: a network disk answers each after some milliseconds, in which others can be asked for."""


def open_data(recipe: Sections) -> Data:
    """Return the splits that a recipe asks for, from the node's own disk if it says so. Never touches the network.

    Raises DataError if the data is missing, unreadable, or not what the recipe says, and RecipeError if the recipe lacks a key.
    """
    return open_staged(staged(recipe))


def open_staged(recipe: Sections) -> Data:
    """Return the splits from where `staged` has put them. Raises DataError and RecipeError as `open_data`."""
    return {split: decoded_once(images) for split, images in open_undecoded(recipe).items()}


def open_undecoded(recipe: Sections) -> Data:
    """Return the splits without decoding images that are not needed to open them. Raises as `open_staged`."""
    path, source = recipe.data.path, recipe.data.source
    if path and source in ("digits", "fakedata"):
        raise RecipeError(f"data.path is {path}, and data.source={source} reads no files: remove it, or set data.source")
    return OPEN[source](recipe)


def open_stored(recipe: Sections) -> Data:
    """Return the splits with their images as they are stored: not resized."""
    data = located(recipe).data
    # An image folder needs a size for its batches alone, which are not used here.
    size = (data.image_size or 1) if data.source in ("imagefolder", "fakedata") else None
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
    elif source in DOWNLOADABLE:
        try:
            with one_process_per_node(root / ".download.lock"):
                download_files(recipe)
        except (OSError, RuntimeError) as error:
            why = ": ".join(dict.fromkeys([first_line(error).rstrip(":"), *str(error).strip().splitlines()[1:][-1:]]))
            raise DataError(
                f"data.source={source} cannot be downloaded into {root}: {why}. Without a network, copy the files here and set "
                "data.path to them"
            ) from error


def notes_on(data: Mapping[str, Images]) -> list[str]:
    """Return a sentence for each thing that may not be intended: classes without a training sample, and what is not read."""
    train, notes = data.get("train"), []
    if train is not None and train.labels is not None:
        counts = np.bincount(train.labels, minlength=len(train.classes))
        empty = [name for name, count in zip(train.classes, counts, strict=True) if not count]
        if empty:
            notes.append(
                f"{len(empty)} of the {len(train.classes)} classes have no training samples ({listed(empty, 5)}), but the "
                "model has an output for each. If labels are integers, number classes from 0 without gaps"
            )
    return notes + not_read(data)


def not_read(data: Mapping[str, Images]) -> list[str]:
    """Return a sentence for each folder of the data in which there is something that is not read."""
    return [note for images in data.values() for note in images.not_read]


# Where the data is -----------------------------------------------------------------------------------------------------


def located(recipe: Sections) -> Sections:
    """Return the recipe with `~` and variables in data.path filled in. Raises RecipeError for a variable that is unset."""
    if recipe.data.path is None:
        return recipe
    return replace(recipe, data=replace(recipe.data, path=text_files.filled_in("data.path", recipe.data.path)))


def staged(recipe: Sections) -> Sections:
    """Return the recipe with data.path on the node's own disk, copied there now unless it is: see the module.

    Raises RecipeError without a data.path, or for a variable that is not set here, and DataError if data.path is no file or
    folder, or the disk cannot be written.
    """
    recipe = located(recipe)
    if recipe.data.stage_to is None:
        return recipe
    if recipe.data.path is None:
        raise RecipeError(f"data.stage_to is {recipe.data.stage_to}, but data.path, the data to copy, is not set: set it")
    source = Path(recipe.data.path)
    folder = Path(text_files.filled_in("data.stage_to", recipe.data.stage_to))
    if not source.exists():
        raise DataError(f"data.path={source} is not a file or folder here, so it cannot be copied to data.stage_to={folder}")
    files = sorted(_files(source))
    identity = repr((str(source.resolve()), files)).encode()
    try:
        own = own_folder(folder / f"samerun-{os.geteuid()}")
        place = own / f"{source.name}-{hashlib.sha256(identity).hexdigest()[:16]}"
        made_once(place, lambda temporary: _copy(source, temporary / source.name, files))
    except OSError as error:
        raise DataError(
            f"{source} cannot be copied to data.stage_to={folder}: {error.strerror or error}. Choose a "
            "writable folder with room on a local disk of the node, or remove data.stage_to"
        ) from error
    return replace(recipe, data=replace(recipe.data, path=str(place / source.name)))  # the ending may tell what a file is


def _files(source: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path below `source`, size in bytes and time of change of all files in it, or of the file that it is (path "").

    Links are followed as readers do. Raises DataError.
    """
    in_folder = (str(Path(folder.name, name)) for folder in walk(source, "", NotRead()) for name in folder.files)
    for name in [""] if source.is_file() else in_folder:
        with reading(source / name, "remove it"):
            status = regular_file(source / name)
        yield name, status.st_size, status.st_mtime_ns


def _copy(source: Path, target: Path, files: list[tuple[str, int, int]]) -> None:
    """Copy the files. Raises OSError."""
    total_bytes = sum(size_bytes for _, size_bytes, _ in files)
    for folder in sorted({(target / name).parent for name, _, _ in files}):
        folder.mkdir(parents=True, exist_ok=True)
    doing = progress(f"copying {source} to {target.parent.parent.parent}", total_bytes, "bytes")
    with doing as advance, ThreadPoolExecutor(_COPIERS) as pool:
        copied = pool.map(lambda file: shutil.copy2(source / file[0], target / file[0]), files)
        for (_, size_bytes, _), _ in zip(files, copied, strict=True):
            advance(size_bytes)
