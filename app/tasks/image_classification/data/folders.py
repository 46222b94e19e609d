"""A folder of images: path/<split>/<class>/<image>, as torchvision's ImageFolder finds them, or path/<class>/<image>.

Images below class folders are listed once on a machine; the list is kept, and mapped into memory. Listing a million files takes
a minute on a network disk, and their names take hundreds of megabytes in every process. So a list is kept below the user's
cache ($SAMERUN_CACHE), one process of a node makes it, and it is made again when a folder has changed: one in which a file
appears, disappears or is renamed has another date. What is listed, and in which order, is what ImageFolder finds, without what
`app.data.data_files` leaves out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import BESIDE_FOLDERS, NotRead, read_folder, walk
from app.data.preprocessing import cache_folder, one_process_per_node, progress
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.files.atomic_files import remove_remains
from app.tasks.image_classification.data.arrays import Mapped
from app.tasks.image_classification.data.decoding import content_of
from app.tasks.image_classification.data.images import Data, Images, Stored, without_left_out
from app.tasks.image_classification.data.splits import TEST_NAMES, VALIDATION_NAMES, NoSplitError, Splits, each_split
from app.tasks.image_classification.sections import DataRecipe, Sections

FINGERPRINT_BYTES = 1 << 16
"""Bytes of an image file that the fingerprint covers, in addition to the file's size."""
LISTING_FORMAT = 3
"""Version of the list's layout, part of its file name."""
_COLUMNS: dict[str, type[np.generic]] = {"names.bin": np.uint8, "ends.bin": np.int64, "labels.bin": np.int64}
_ABOUT = "listing.json"
_TICK_NS = 2 * 10**9
"""The coarsest resolution of modification times: a folder that changes twice within it may keep its time."""
_NAMED = 5
"""Folders that a sentence names."""


def open_folder(recipe: Sections) -> Data:
    """Open the splits: RGB (or data.color=gray), data.image_size pixels, one class for each sub-folder.

    Class folders without a folder for each split around them are all for training.
    """
    data = recipe.data
    if data.path is None or data.image_size is None:
        needed = {
            "data.path": (data.path, "the folder that contains a folder for each split"),
            "data.image_size": (data.image_size, "the side in pixels to resize images to (usually 224)"),
        }
        raise RecipeError(*(f"data.source=imagefolder needs {key}: {why}" for key, (value, why) in needed.items() if not value))
    root = Path(data.path)
    if _is_flat(root, data):
        found = Splits((root, _classes(root, "data.path")), None, None)
    else:
        found = each_split(data, lambda name, key: (root / name, _classes(root / name, key)))
    (first, classes), *others = found.there.values()
    for folder, other in others:
        if other != classes:
            sides = ((first, set(classes) - set(other)), (folder, set(other) - set(classes)))
            only = "; ".join(f"{listed(sorted(names), 5)} only in {place}" for place, names in sides if names)
            raise DataError(f"the class folders of two splits differ: {only}. Both need the same class folders")
    shape = (1 if data.color == "gray" else 3, data.image_size, data.image_size)

    listings: dict[str, Listing] = {}

    def opened(split: str, part: tuple[Path, list[str]]) -> Images:
        folder, below, files = part[0], os.path.relpath(part[0], root), images_below(part[0], classes)
        listings[split] = files
        return Images(
            read=functools.partial(_read, folder, files),
            size=len(files),
            labels=files.labels,
            classes=tuple(classes),
            where=str(folder),
            prefix="" if below == "." else f"{below}/",
            paths=files.path,
            not_read=(f"{folder}: {files.left_out}",) if files.left_out else (),
        )

    def complete(split: str, images: Images) -> Images:
        files, names = listings[split], listings[split].names
        empty = np.flatnonzero(np.bincount(images.labels, minlength=len(classes)) == 0)  # type: ignore[arg-type]
        if empty.size:
            without = ", ".join(classes[index] for index in empty[:_NAMED])
            not_read = f" ({files.left_out})" if files.left_out else ""
            problem = f"{images.where}: there are no images in the class folder(s) {without}{not_read}"
            raise DataError(f"{problem}; add images, or remove these folders from all splits")
        if images.places is not None:
            rest = (os.fsencode(files.path(place)) for place in images.places.tolist())
            names = np.frombuffer(b"\0".join(rest), np.uint8)
        return images.completed(recipe, shape, training=split == "train", listing=[names.data], content=_head)

    return _with_unused(without_left_out(found.changed(opened), data).changed(complete), root)


def _head(stored: Stored) -> bytes:
    assert isinstance(stored.value, bytes)
    return b"%d:%b" % (len(stored.value), stored.value[:FINGERPRINT_BYTES])


def _read(folder: Path, files: Listing, places: Sequence[int]) -> Iterator[Stored]:
    for place in places:
        path = folder / files.path(place)
        yield Stored(content_of(path), str(path))


def _with_unused(splits: Data, root: Path) -> Data:
    """Return the splits; the last one also names the folders that no split reads."""
    *_, (last, images) = splits.there.items()
    used = {Path(images.prefix).parts[0] for images in splits.there.values() if images.prefix}
    unused = [name for name in read_folder(root, "", NotRead()).folders if name not in used] if used else []
    if not unused:
        return splits
    note = f"{root}: no split of the recipe reads {listed(unused, _NAMED)}"
    return splits._replace(**{last: replace(images, not_read=(*images.not_read, note))})


def _is_flat(root: Path, data: DataRecipe) -> bool:
    """Return True if the folder holds class folders: neither it nor a folder in it has one for a split."""
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
        raise DataError(f"{folder} contains no class folders; put images into {folder}/<class>/")
    return classes


# The list of files -----------------------------------------------------------------------------------------------------


class Listing:
    """Files, each by its path below the folder and its label. Pickled, one that is kept is its place."""

    def __init__(self, columns: Sequence[np.ndarray], left_out: NotRead, kept: tuple[Path, int] | None = None) -> None:
        self.names = columns[0]
        """The paths, bytes with a zero between two, uint8."""
        self._ends = columns[1]  # where each path ends in `names`, int64 [N]
        self.labels = columns[2]
        """int64 [N]."""
        self.left_out = left_out
        """Files and folders that are not images."""
        self._kept = kept

    @classmethod
    def in_folder(cls, place: Path, listed_ns: int | None) -> Listing:
        """Return the list in `place`, mapped if it was made at `listed_ns`; None: in memory. Raises DataError if it is gone."""
        try:
            about = json.loads((place / _ABOUT).read_text())
            found_ns, left_out = about["listed_ns"], NotRead(about["left_out"])
            if listed_ns is None:
                return cls([np.fromfile(place / name, kind) for name, kind in _COLUMNS.items()], left_out)
            sizes = [(place / name).stat().st_size for name in _COLUMNS]
            columns = [
                Mapped.of_file(place / name, 0, (size // np.dtype(kind).itemsize,), kind).array
                for (name, kind), size in zip(_COLUMNS.items(), sizes, strict=True)
            ]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{place}, the list of images of this run, is gone ({error}): start the run again") from error
        if found_ns != listed_ns:
            raise DataError(
                f"{place}, the list of images of this run, was replaced as their folder changed: start the run again"
            )
        return cls(columns, left_out, (place, listed_ns))

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        """Return the path of a file."""
        start = int(self._ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self.names[start : int(self._ends[index])].tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._kept is None:
            return Listing, ((self.names, self._ends, self.labels), self.left_out)
        return Listing.in_folder, self._kept


def images_below(folder: Path, classes: Sequence[str]) -> Listing:
    """Return the images below `folder`/CLASS for each of the classes; a label is the place of its class among them.

    Where no list can be kept, it is made in memory. Raises DataError if a folder cannot be read.
    """
    name = hashlib.sha256(json.dumps([LISTING_FORMAT, str(folder.resolve())]).encode()).hexdigest()[:32]
    try:
        place = cache_folder("listings") / name
        with one_process_per_node(place.with_suffix(".lock")):
            return _kept(place, folder, classes) or _made(place, folder, classes)
    except OSError:
        with tempfile.TemporaryDirectory() as elsewhere:
            _write(Path(elsewhere), folder, classes)
            return Listing.in_folder(Path(elsewhere), None)


def _kept(place: Path, folder: Path, classes: Sequence[str]) -> Listing | None:
    """Return the list in `place` if it is whole and every folder is as it was."""
    try:
        about = json.loads((place / _ABOUT).read_text())
        is_whole = [(place / name).stat().st_size for name in _COLUMNS] == about["sizes_bytes"]
        is_unchanged = all((folder / name).stat().st_mtime_ns == date_ns for name, date_ns in about["dates_ns"].items())
        if is_whole and is_unchanged and about["classes"] == list(classes):
            return Listing.in_folder(place, about["listed_ns"])
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
            return Listing.in_folder(new, None)
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
        return Listing.in_folder(place, listed_ns)


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
    doing = progress(f"listing the images of {folder}", len(classes), "folders")
    with names_file, ends_file, labels_file, doing as advance:
        for label, name in enumerate(classes):
            paths: list[bytes] = []
            for found in sorted(walk(folder, name, left_out)):
                dates_ns[found.name] = found.changed_ns
                for path in (f"{found.name}/{file}" for file in found.files):
                    if has_file_allowed_extension(path, IMG_EXTENSIONS):
                        paths.append(os.fsencode(path))
                    else:
                        left_out.add_ending(path)
            advance(1)
            if not paths:
                continue
            names_file.write((b"" if end < 0 else b"\0") + b"\0".join(paths))
            ends = end + np.cumsum([1 + len(path) for path in paths], dtype=np.int64)
            ends_file.write(ends.tobytes())
            labels_file.write(np.full(len(paths), label, np.int64).tobytes())
            end = int(ends[-1])
    about = {
        "folder": str(folder),
        "classes": list(classes),
        "listed_ns": listed_ns,
        "sizes_bytes": [(place / name).stat().st_size for name in _COLUMNS],
        "left_out": left_out.found,
    }
    (place / _ABOUT).write_text(json.dumps({**about, "dates_ns": dates_ns}))
    return listed_ns, max(dates_ns.values())
