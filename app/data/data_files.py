"""Files of data: which count below a folder, compressed ones, and tables with unique columns.

A name that begins with a dot is hidden: macOS (`._x.png`), Jupyter (`.ipynb_checkpoints`) and editors make such files. They are
left out, with everything in such a folder. A name that begins with an underscore is data. Linked folders are followed, as
torchvision's ImageFolder does.

Files of a numbered set, as `train-00000-of-00003.parquet`, belong together: a missing one is an error.
"""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from app.environment.topology import listed
from app.errors import DataError
from app.files.other_libraries import extra

BESIDE_FOLDERS = "next to the class folders"
_NUMBER_OF = re.compile(r"(\d+)[-_.]of[-_.](\d+)")
_LAST_NUMBER = re.compile(r"(\d+)(?=\D*$)")
# The `datasets` library once put a hash of its content behind the number of a shard.
_CONTENT_HASH = re.compile(r"^-[0-9a-f]{16}(?=\.)")
_NAMED, _MOST_MISSING = 5, 100_000


class NotRead:
    """Files and folders that are not read: how many, and the first of them, by reason."""

    def __init__(self, found: Mapping[str, tuple[int, str]] | None = None) -> None:
        self.found = dict(found or {})

    def add(self, reason: str, path: str) -> None:
        """Count a file or folder."""
        count, first = self.found.get(reason, (0, path))
        self.found[reason] = count + 1, first

    def add_ending(self, path: str) -> None:
        """Count a file whose ending is not read."""
        self.add(Path(path).suffix.lower() or Path(path).name, path)

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        """Return, for example, `5 files or folders left out: 2 .txt, 1 .csv, 2 hidden, such as b.txt and a.csv`."""
        reasons = sorted(self.found.items())
        total = sum(count for _, (count, _) in reasons)
        parts = listed([f"{count} {reason}" for reason, (count, _) in reasons], _NAMED)
        examples = " and ".join(repr(first)[1:-1] for _, (_, first) in reasons[:2])
        return f"{total} {'file or folder' if total == 1 else 'files or folders'} left out: {parts}, such as {examples}"


class Folder(NamedTuple):
    """A folder that was read."""

    name: str
    """Path below the top; empty for the top itself."""
    files: list[str]
    """Names of its files, sorted. A link to nothing is one, which cannot be read."""
    folders: list[str]
    """Names of the folders in it, sorted."""
    changed_ns: int
    """Time of its last change, taken before it was read: a change while it is read gives another time."""
    identity: tuple[int, int]
    """Device and inode."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is left out."""
    return name.startswith(".")


def read_folder(top: Path, name: str, not_read: NotRead, *, hidden: bool = False) -> Folder:
    """Return what one folder below `top` contains, with hidden names if `hidden`, and count the rest. Raises OSError."""
    files, folders = [], []
    status = (top / name).stat()
    with os.scandir(top / name) as scan:
        for entry in sorted(scan, key=lambda entry: entry.name):
            path, is_folder = f"{name}/{entry.name}" if name else entry.name, _is_folder(entry)
            if is_hidden(entry.name) and not hidden:
                not_read.add("hidden", path)
            elif is_folder:
                folders.append(entry.name)
            elif entry.is_symlink() or entry.is_file():
                files.append(entry.name)
            else:
                not_read.add("neither file nor folder", path)
    return Folder(name, files, folders, status.st_mtime_ns, (status.st_dev, status.st_ino))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: a file that cannot be read
        return False


def walk(top: Path, below: str, not_read: NotRead, *, hidden: bool = False) -> Iterator[Folder]:
    """Yield the folder `below` and all folders below it, whose names are paths from `top` on.

    Raises DataError if a folder cannot be read, or contains itself by a link.
    """
    to_read: list[tuple[str, frozenset[tuple[int, int]]]] = [(below, frozenset())]
    while to_read:
        name, above = to_read.pop()
        try:
            folder = read_folder(top, name, not_read, hidden=hidden)
        except OSError as error:
            raise DataError(f"{top / name} cannot be read ({error.strerror}); repair or remove it") from error
        if folder.identity in above:
            raise DataError(f"{top / name} contains itself, by a link in it: remove the link")
        yield folder
        to_read += [(f"{name}/{inner}" if name else inner, above | {folder.identity}) for inner in reversed(folder.folders)]


class NumberedSet(NamedTuple):
    """Files in one folder whose names differ in a number alone."""

    before: str
    """Their path up to the number."""
    digits: int
    after: str
    total: int | None
    """Number of files of the set, if their names contain it."""
    files: dict[int, Path]


def numbered_sets(files: Iterable[Path]) -> list[NumberedSet]:
    """Return the numbered sets among files, those of a single file included; a file without a number is in none."""
    sets: dict[tuple[str, str], NumberedSet] = {}
    for file in files:
        number = _NUMBER_OF.search(file.name) or _LAST_NUMBER.search(file.name)
        if number is None:
            continue
        path = str(file)
        start, end = len(path) - len(file.name) + number.start(1), len(path) - len(file.name) + number.end(1)
        total = int(number[2]) if number.re is _NUMBER_OF else None
        after = path[end : end + number.end() - number.end(1)] + _CONTENT_HASH.sub("", file.name[number.end() :])
        new = NumberedSet(path[:start], len(number[1]), after, total, {})
        sets.setdefault((new.before, new.after), new).files[int(number[1])] = file
    return list(sets.values())


def check_complete(
    files: Iterable[Path],
    what: str = "a numbered set",
    *,
    remedy: str = "name each file to read",
    wanted: Callable[[Path], bool] = lambda _: True,
    gaps_from_0: bool | None = None,
) -> None:
    """Raise DataError if a file is missing of a set whose names say how many there are, and that file is `wanted`.

    With `gaps_from_0`, also if one is missing among those of any other set, which begins with 0 if it is True.
    """
    for each in numbered_sets(files):
        if each.total is not None:  # numbered from 0, or from 1 as the weights of a model are
            first = int(each.total in each.files and 0 not in each.files)
            numbers = range(first, first + each.total)
        elif gaps_from_0 is not None:
            numbers = range(0 if gaps_from_0 else min(each.files), max(each.files) + 1)
        else:
            continue
        names = (Path(f"{each.before}{number:0{each.digits}}{each.after}") for number in numbers if number not in each.files)
        if missing := [file for file in islice(names, _MOST_MISSING) if wanted(file)]:
            raise DataError(
                f"{missing[0].parent} lacks {len(missing)} of {len(numbers)} shards of {what}: "
                f"{listed([file.name for file in missing], _NAMED)}; copy them here, or {remedy}"
            )


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def is_compressed(path: Path) -> bool:
    """Return whether the name of a file says that it is compressed."""
    return path.suffix.lower() in SUFFIXES


@contextmanager
def open_decompressed(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed. Raises DataError, in the block as well, if it cannot be read to its end."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if path.suffix.lower() == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            with extra(f"{path}: .zst"):
                from backports import zstd
        window = {zstd.DecompressionParameter.window_log_max: 31}  # `zstd --long=31` writes such files
        openers[".zst"] = functools.partial(zstd.open, options=window)
        errors = (*errors, zstd.ZstdError)
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except errors as error:
        raise damaged_file_error(path, error) from error


def damaged_file_error(path: Path | str, error: Exception) -> DataError:
    """Return the error for a file that a decompressor, or another library, cannot read to its end."""
    if isinstance(error, OSError) and error.errno:
        return DataError(f"{path} cannot be read ({error.strerror}); repair or remove it")
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(f"{path} cannot be read to its end ({why}): it is truncated or damaged; replace it")


def check_columns(file: Path, wanted: Collection[str]) -> None:
    """Raise DataError if a .csv file has one of the columns twice: pandas renames the second. Other formats refuse it."""
    if file.suffix.lower() == ".csv":
        with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            check_names(next(csv.reader(lines), []), wanted, str(file))


def check_names(names: Sequence[str], wanted: Collection[str], where: str) -> None:
    """Raise DataError if one of the columns, or any if none are named, is there twice."""
    twice = [name for name, count in Counter(names).items() if count > 1 and (not wanted or name in wanted)]
    if twice:
        raise DataError(f"{where} has the column {twice[0]!r} twice: rename or remove one of them")
