"""The pictures below a folder of class folders: listed once on a machine, kept, and mapped into memory.

Listing a million files takes a minute on a network disk, and their names take hundreds of megabytes in every process. So a
list is kept below the user's cache ($SAMERUN_CACHE), one process of a node makes it, and it is made again when a folder has
changed: one in which a file appears, disappears or is renamed has another date. What is listed, and in which order, is what
torchvision's ImageFolder finds, without what `app.data.data_files` leaves out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import BESIDE_FOLDERS, NotRead, walk
from app.data.preprocessing import alone, cache_folder, progress
from app.errors import DataError
from app.files.atomic_files import remove_remains

FORMAT = 3
"""Version of this layout, part of the list's file name."""
_COLUMNS: dict[str, type[np.generic]] = {"names.bin": np.uint8, "ends.bin": np.int64, "labels.bin": np.int64}
_ABOUT = "listing.json"
_TICK_NS = 2 * 10**9
"""The coarsest resolution of modification times: a folder that changes twice within it may keep its time."""


class Listing:
    """Files, each by its path below the folder and its label. Pickled, one that is kept is its place."""

    def __init__(self, columns: Sequence[np.ndarray], left_out: NotRead, kept: tuple[Path, int] | None = None) -> None:
        self.names = columns[0]
        """The paths, bytes with a zero between two, uint8."""
        self.labels = columns[2]
        """int64 [N]."""
        self.left_out = left_out
        """Files and folders that are no pictures."""
        self._ends, self._kept = columns[1], kept  # where each path ends in `names`, int64 [N]

    @classmethod
    def mapped(cls, place: Path, listed_ns: int) -> Listing:
        """Return the one that was made at this time and is kept in `place`. Raises DataError if it is there no more."""
        try:
            about = json.loads((place / _ABOUT).read_text())
            found_ns, left_out = about["listed_ns"], NotRead(about["left_out"])
            columns = [_mapped(place / name, kind) for name, kind in _COLUMNS.items()]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{place}, the list of pictures that this run uses, is gone ({error}): start the run again"
            ) from error
        if found_ns != listed_ns:
            raise DataError(
                f"{place}, the list of pictures that this run uses, was replaced because their folder changed: "
                "start the run again"
            )
        return cls(columns, left_out, (place, listed_ns))

    @classmethod
    def in_memory(cls, place: Path) -> Listing:
        """Return the one in `place`, of which nothing is needed any longer."""
        left_out = NotRead(json.loads((place / _ABOUT).read_text())["left_out"])
        return cls([np.fromfile(place / name, kind) for name, kind in _COLUMNS.items()], left_out)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Return the path of a file."""
        start = int(self._ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self.names[start : int(self._ends[index])].tobytes())

    def without(self, gone: np.ndarray) -> Listing:
        """Return the list without some, int64 [k] in ascending order: in memory, as if they had not been there."""
        ends = np.delete(np.diff(self._ends, prepend=-1), gone).cumsum() - 1
        stays = np.ones(len(self.names) + 1, bool)
        for index in gone.tolist():
            stays[(int(self._ends[index - 1]) + 1 if index else 0) : int(self._ends[index]) + 1] = False
        names = np.append(self.names, np.uint8(0))[stays][:-1]
        return Listing((names, ends, np.delete(self.labels, gone)), self.left_out)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._kept is None:
            return Listing, ((self.names, self._ends, self.labels), self.left_out)
        return Listing.mapped, self._kept


def pictures_below(folder: Path, classes: Sequence[str]) -> Listing:
    """Return the pictures below `folder`/CLASS for each of the classes; a label is the place of its class among them.

    Where no list can be kept, it is made in memory. Raises DataError if a folder cannot be read.
    """
    name = hashlib.sha256(json.dumps([FORMAT, str(folder.resolve())]).encode()).hexdigest()[:32]
    try:
        place = cache_folder("listings") / name
        with alone(place.with_suffix(".lock")):
            return _kept(place, folder, classes) or _made(place, folder, classes)
    except OSError:
        with tempfile.TemporaryDirectory() as elsewhere:
            _write(Path(elsewhere), folder, classes)
            return Listing.in_memory(Path(elsewhere))


def _kept(place: Path, folder: Path, classes: Sequence[str]) -> Listing | None:
    """Return the list in `place` if it is whole and every folder is as it was."""
    try:
        about = json.loads((place / _ABOUT).read_text())
        is_whole = [(place / name).stat().st_size for name in _COLUMNS] == about["sizes_bytes"]
        is_unchanged = all((folder / name).stat().st_mtime_ns == date_ns for name, date_ns in about["dates_ns"].items())
        if is_whole and is_unchanged and about["classes"] == list(classes):
            return Listing.mapped(place, about["listed_ns"])
    except (OSError, ValueError, KeyError):  # none, or a damaged one: it is made again
        pass
    return None


def _made(place: Path, folder: Path, classes: Sequence[str]) -> Listing:
    """List the folder, and keep the list in `place` unless the folder changes just now. Raises OSError and DataError."""
    remove_remains(place)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent) as temporary:
        new = Path(temporary, "list")
        new.mkdir()
        listed_ns, last_change_ns = _write(new, folder, classes)
        if last_change_ns >= listed_ns - _TICK_NS:
            return Listing.in_memory(new)
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
        return Listing.mapped(place, listed_ns)


def _write(place: Path, folder: Path, classes: Sequence[str]) -> tuple[int, int]:
    """Write the list's files; return when it was begun, and when a folder last changed. Raises OSError and DataError."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension  # not at the top: it takes a second

    listed_ns, end = time.time_ns(), -1
    left_out = NotRead()
    top = next(walk(folder, "", left_out))
    for name in top.files:
        left_out.add(BESIDE_FOLDERS, name)
    dates_ns = {"": top.changed_ns}
    names_file, ends_file, labels_file = ((place / name).open("wb") for name in _COLUMNS)
    doing = progress(f"listing the pictures of {folder}", len(classes), "folders")
    with names_file, ends_file, labels_file, doing as advance:
        for label, name in enumerate(classes):
            pictures = []
            for found in sorted(walk(folder, name, left_out)):
                dates_ns[found.name] = found.changed_ns
                for path in (f"{found.name}/{file}" for file in found.files):
                    if has_file_allowed_extension(path, IMG_EXTENSIONS):
                        pictures.append(path)
                    else:
                        left_out.add_ending(path)
            paths = [os.fsencode(path) for path in pictures]
            advance(1)
            if not paths:
                continue
            names_file.write((b"" if end < 0 else b"\0") + b"\0".join(paths))
            ends = end + np.cumsum([1 + len(path) for path in paths], dtype=np.int64)
            ends_file.write(ends.tobytes())
            labels_file.write(np.full(len(paths), label, np.int64).tobytes())
            end = int(ends[-1])
    sizes_bytes = [(place / name).stat().st_size for name in _COLUMNS]
    about = {
        "folder": str(folder),
        "classes": list(classes),
        "listed_ns": listed_ns,
        "sizes_bytes": sizes_bytes,
        "left_out": left_out.found,
    }
    (place / _ABOUT).write_text(json.dumps({**about, "dates_ns": dates_ns}))
    return listed_ns, max(dates_ns.values())


def _mapped(path: Path, kind: type[np.generic]) -> np.ndarray:
    if path.stat().st_size == 0:  # of which there is nothing to map
        return np.empty(0, kind)
    return np.asarray(np.memmap(path, kind, mode="r"))
