"""Splits that are made once on a machine and then shared: unpacked, decoded or resized pictures of one size.

They are kept below $SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun, each named by a hash of what it was made of:
of other files, or of files that changed, another one is made. One process makes it while the others of the node wait. Nothing
is removed here: `rm -r` any of it at any time, it is made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from app.data.preprocessing import alone, cache_folder
from app.errors import DataError
from app.files.atomic_files import remove_remains
from app.tasks.image_classification.data.split import FORMAT, Split, Unstored, open_split, write_split

# Less than this is not worth a file: each process holds it in memory, beside the 200 MB that torch takes.
SMALL_BYTES = 8 << 20


def keep(made_of: Sequence[object], size_bytes: int, read: Callable[[], Unstored]) -> Split:
    """Return the split that `read` reads or makes: in memory if it is small, else from the file that it is kept in.

    `made_of` is all that decides what `read` gives, as JSON has it (see `stamps`), and `size_bytes` about how many bytes its
    pictures take. Raises DataError if the split cannot be read, or not be written where it is kept.
    """
    if size_bytes <= SMALL_BYTES:
        return read().in_memory()
    name = hashlib.sha256(json.dumps([FORMAT, *made_of], default=str).encode()).hexdigest()[:32]
    try:
        folder = cache_folder("splits") / name
    except OSError as error:
        raise DataError(_unusable(str(error.filename), error)) from error
    if folder.exists():
        try:
            return open_split(folder)
        except DataError:  # damaged: made again below
            pass
    try:
        with alone(folder.with_suffix(".lock")):
            return _make(folder, read)
    except OSError as error:
        raise DataError(_unusable(str(folder.parent), error)) from error


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return what tells that files are still the same without reading them: path, size in bytes, time of change in ns."""
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror}); replace the file") from error
        found.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return found


def _make(folder: Path, read: Callable[[], Unstored]) -> Split:
    """Return the split in `folder`, made now unless another process has done so meanwhile. The lock is held."""
    if folder.exists():
        try:
            return open_split(folder)
        except DataError:
            shutil.rmtree(folder)
    remove_remains(folder)
    try:
        write_split(folder, read())
    except DataError:
        if not folder.exists():  # where there are no locks, another process may have been first
            raise
    return open_split(folder)


def _unusable(folder: str, error: OSError) -> str:
    return (
        f"{folder}, the cache for unpacked data, cannot be used ({error.strerror or error}); set "
        "SAMERUN_CACHE to a writable folder, best on a local disk"
    )
