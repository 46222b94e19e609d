"""Files of data: which count below a folder, compressed ones, and tables with unique columns.

A name that begins with a dot is hidden: macOS (`._x.png`), Jupyter (`.ipynb_checkpoints`) and editors make such files. They are
left out, with everything in such a folder. A name that begins with an underscore is data. Linked folders are followed, as
torchvision's ImageFolder does.

Files of a numbered set, as `train-00000-of-00003.parquet`, belong together: a missing one is an error.
"""

from __future__ import annotations

import bz2
import csv
import errno
import fnmatch
import functools
import gzip
import lzma
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from app.environment.topology import listed
from app.errors import DataError
from app.files.atomic_files import made_whole
from app.files.other_libraries import extra

BESIDE_FOLDERS = "next to the class folders"
_NUMBER_OF = re.compile(r"(\d+)[-_.]of[-_.](\d+)")
_LAST_NUMBER = re.compile(r"(\d+)(?=\D*$)")
# The `datasets` library once put a hash of its content behind the number of a shard.
_CONTENT_HASH = re.compile(r"(?<=\d)-[0-9a-f]{16}(?=\.)")
_NAMED, _MOST_MISSING = 5, 100_000


class NotRead(Counter[str]):
    """Numbers of files and folders that are not read, by reason."""

    def add_ending(self, path: str) -> None:
        """Count a file whose ending is not read."""
        self[Path(path).suffix.lower() or Path(path).name] += 1

    def __str__(self) -> str:
        """Return, for example, `5 files or folders left out: 2 .txt, 1 .csv, 2 hidden`."""
        total, parts = self.total(), listed([f"{count} {reason}" for reason, count in sorted(self.items())], _NAMED)
        return f"{total} {'file or folder' if total == 1 else 'files or folders'} left out: {parts}"


class Folder(NamedTuple):
    """A folder that was read."""

    name: str
    """Path below the top; empty for the top itself."""
    files: list[str]
    """Names of its files, sorted. A link to nothing is one, which cannot be read."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is left out."""
    return name.startswith(".")


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted. Raises OSError."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))


def walk(top: Path, below: str, not_read: NotRead) -> Iterator[Folder]:
    """Yield the folder `below` and all folders below it, whose names are paths from `top` on, and count what is hidden.

    Raises DataError if a folder cannot be read, or contains itself by a link.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); repair or remove it") from error

    for place, folders, files in os.walk(top / below, onerror=refuse, followlinks=True):
        folder = Path(place)
        if folder.is_symlink() and any(folder.samefile(above) for above in folder.parents):
            raise DataError(f"{folder} contains itself, by a link in it: remove the link")
        not_read.update("hidden" for name in (*folders, *files) if is_hidden(name))
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        name = "" if folder == top else str(folder.relative_to(top))
        yield Folder(name, sorted(name for name in files if not is_hidden(name)))


class NumberedSet(NamedTuple):
    """Files in one folder whose names differ in a number alone."""

    folder: Path
    before: str
    """Their name up to the number."""
    digits: int
    after: str
    total: int | None
    """Number of files of the set, if their names contain it."""
    files: dict[int, Path]


def numbered_sets(files: Iterable[Path]) -> list[NumberedSet]:
    """Return the numbered sets among files; a set may have a single file, and a file without a number is in no set."""
    sets: dict[tuple[Path, str, str], NumberedSet] = {}
    for file in files:
        name = _CONTENT_HASH.sub("", file.name)
        if number := _NUMBER_OF.search(name) or _LAST_NUMBER.search(name):
            before, after = name[: number.start(1)], name[number.end(1) :]
            total = int(number[2]) if number.re is _NUMBER_OF else None
            new = NumberedSet(file.parent, before, len(number[1]), after, total, {})
            sets.setdefault((file.parent, before, after), new).files[int(number[1])] = file
    return list(sets.values())


def check_complete(
    files: Iterable[Path],
    what: str = "a numbered set",
    *,
    remedy: str = "name each file to read",
    pattern: str = "*",
    gaps_from_0: bool | None = None,
) -> None:
    """Raise DataError if a file is missing of a set whose names say how many there are, and its path matches the pattern.

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
        names = (f"{each.before}{number:0{each.digits}}{each.after}" for number in numbers if number not in each.files)
        wanted = (name for name in names if fnmatch.fnmatch(str(each.folder / name), pattern))
        if missing := list(islice(wanted, _MOST_MISSING)):
            raise DataError(
                f"{each.folder} lacks {len(missing)} of {len(numbers)} shards of {what}: {listed(missing, _NAMED)}; "
                f"copy them here, or {remedy}"
            )


def regular_file(path: Path) -> os.stat_result:
    """Return the status of a file. Raises OSError, also if it is a pipe or a device, of which a read can wait for ever."""
    if not stat.S_ISREG((status := path.stat()).st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder, not a file", str(path))
    return status


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def is_compressed(path: Path) -> bool:
    """Return whether the name of a file says that it is compressed."""
    return path.suffix.lower() in SUFFIXES


@contextmanager
def open_decompressed(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed. Raises DataError, in the block as well, if it cannot be read to its end."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError)
    if path.suffix.lower() == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            with extra(f"{path}: .zst"):
                from backports import zstd
        window = {zstd.DecompressionParameter.window_log_max: 31}  # `zstd --long=31` writes such files
        openers[".zst"] = functools.partial(zstd.open, options=window)
        errors = (*errors, zstd.ZstdError)
    with reading(path, errors=errors), openers.get(path.suffix.lower(), open)(path, "rb") as file:
        yield file


@contextmanager
def reading(name: object, remedy: str = "repair or replace it", *, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise DataError, saying that `name` cannot be read, for an OSError in the block, or one of a library's `errors`."""
    expected: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except expected as error:
        why = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise DataError(f"{name} cannot be read ({why}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes `out` when the block is done. Raises DataError, also if `out` exists."""
    if out.exists() or out.is_symlink():
        raise DataError(f"{out} already exists, and no files are replaced: choose another --out, or remove it")
    try:
        with made_whole(out) as temporary:
            yield temporary
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{out} cannot be written: {why}. Free space there, or choose another folder") from error


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
