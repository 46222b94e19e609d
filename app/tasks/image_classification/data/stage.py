"""Where data is on this machine: paths with variables filled in, and copies on the node's own disk.

With `data.stage_to` one process of a node copies `data.path` before training, while the others wait; nodes copy side by side.
A copy is named by a hash of all files' names, sizes and dates: of unchanged data the next run finds it, of changed data
another is made. It appears under its name when it is whole. Copies are in a folder that only this user can use: a node's disk
is often everybody's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from app.data.data_files import NotRead, walk
from app.data.preprocessing import one_process_per_node, progress
from app.errors import DataError, RecipeError
from app.files import paths
from app.files.atomic_files import made_whole, remove_remains
from app.files.paths import own_folder
from app.tasks.image_classification.sections import Sections

# Files copied at a time: a network disk answers each after some milliseconds, in which others can be asked for.
_COPIERS = 8
# Left free beside a copy, for what else a job writes there.
_SPARE_BYTES = 1 << 28


class _File(NamedTuple):
    """A file below data.path."""

    name: str
    """Its path relative to data.path; empty where that is a file itself."""
    size_bytes: int
    changed_ns: int


def located(recipe: Sections) -> Sections:
    """Return the recipe with `~` and variables in data.path filled in. Raises RecipeError for a variable that is unset."""
    if recipe.data.path is None:
        return recipe
    return replace(recipe, data=replace(recipe.data, path=paths.filled_in("data.path", recipe.data.path)))


def staged(recipe: Sections) -> Sections:
    """Return the recipe with data.path on the node's own disk, copied there now unless it is: see the module.

    Raises RecipeError without a data.path, or for a variable that is not set here, and DataError if data.path is no file or
    folder, or the disk has no room for it or cannot be written.
    """
    recipe = located(recipe)
    if recipe.data.stage_to is None:
        return recipe
    if recipe.data.path is None:
        raise RecipeError(f"data.stage_to is {recipe.data.stage_to}, but data.path, the data to copy, is not set: set it")
    source = Path(recipe.data.path)
    folder = Path(paths.filled_in("data.stage_to", recipe.data.stage_to))
    if not source.exists():
        raise DataError(f"data.path={source} is not a file or folder here, so it cannot be copied to data.stage_to={folder}")
    files = sorted(_files(source))
    identity = repr((str(source.resolve()), files)).encode()
    try:
        place = own_folder(folder / f"samerun-{os.geteuid()}") / f"{source.name}-{hashlib.sha256(identity).hexdigest()[:16]}"
        if not place.exists():
            with one_process_per_node(place.with_name(f".{place.name}.lock")):
                _copy(source, place, files)
    except OSError as error:
        raise DataError(
            f"{source} cannot be copied to data.stage_to={folder}: {error.strerror or error}. Choose a "
            "writable folder on a local disk of the node, or remove data.stage_to"
        ) from error
    inside = place / source.name  # the name itself may tell what it is, by its ending
    return replace(recipe, data=replace(recipe.data, path=str(inside)))


def _files(source: Path) -> Iterator[_File]:
    """Yield all files below a folder, links followed as readers do; or the one that `source` is. Raises DataError."""
    in_folder = (str(Path(folder.name, name)) for folder in walk(source, "", NotRead(), hidden=True) for name in folder.files)
    for name in [""] if source.is_file() else in_folder:
        try:
            status = (source / name).stat()
        except OSError as error:
            raise DataError(f"{source / name} cannot be copied to data.stage_to ({error.strerror}): remove it") from error
        yield _File(name, status.st_size, status.st_mtime_ns)


def _copy(source: Path, place: Path, files: list[_File]) -> None:
    """Copy the files to `place`, unless another process has meanwhile. The lock is held. Raises OSError and DataError."""
    if place.exists():
        return
    remove_remains(place)
    total_bytes, free_bytes = sum(file.size_bytes for file in files), shutil.disk_usage(place.parent).free
    disk = place.parent.parent
    if total_bytes + _SPARE_BYTES > free_bytes:
        raise DataError(
            f"{source} takes {total_bytes / 1e9:.2f} GB, and data.stage_to={disk} has {free_bytes / 1e9:.2f} GB free: choose a "
            "larger disk, shrink the images (`samerun data pack`), or remove data.stage_to"
        )
    # Where there are no locks, another process may have been first.
    with suppress(FileExistsError), made_whole(place) as temporary:
        inside = temporary / source.name
        for folder in sorted({(inside / file.name).parent for file in files}):
            folder.mkdir(parents=True, exist_ok=True)
        with (
            progress(f"copying {source} to {disk}", total_bytes, "bytes", after_s=0) as advance,
            ThreadPoolExecutor(_COPIERS) as pool,
        ):
            copied = pool.map(lambda file: shutil.copy2(source / file.name, inside / file.name), files)
            for file, _ in zip(files, copied, strict=True):
                advance(file.size_bytes)
