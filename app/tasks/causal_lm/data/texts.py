"""Where texts are: files, folders and data sets, found in their order and divided into pieces that can be read apart.

How they are divided depends on the sources alone, never on who reads them. What is in a piece says `text_files`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.data import offline
from app.errors import DataError

Kind = Literal["text", "jsonl", "parquet", "datasets"]
KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
"""The kind of a file, by its suffix; before .gz, .bz2, .xz or .zst."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# What the `datasets` library reads by itself of what is a file.
_BUILDERS = {".csv": "csv", ".arrow": "arrow"}
_SMALLEST_PIECE, _LARGEST_PIECE, _PIECES = 1 << 20, 1 << 26, 256


@dataclass(frozen=True)
class Asked:
    """How sources are read."""

    columns: tuple[str, ...] = ("text",)
    """That each row must have; none: whatever it has."""
    more_columns: tuple[str, ...] = ()
    """That are read too where they are."""
    kind: Kind | None = None
    """Of all files; None: by their endings."""
    separator: str | None = None
    """Between the documents of a text file; None: a file is a document."""
    config: str | None = None
    """Of data sets of the `datasets` library, and so are the next two."""
    revision: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Piece:
    """Documents that one process reads: of a file all or some, of a data set some."""

    kind: Kind
    path: str
    """The file, or the name of the data set."""
    start: int
    """The first byte, row group or row; a document belongs to the piece in which it begins."""
    stop: int
    size: int
    """About how many bytes it is to read."""
    stamp: str
    """What tells this content from another one under the same name."""


@dataclass
class Texts:
    """What there is to read."""

    parts: list[tuple[Piece, ...]]
    """The pieces in their order, small ones together."""
    asked: Asked
    datasets: Mapping[str, Any] = field(default_factory=dict)
    """The opened data sets by name."""
    left_out: list[Path] = field(default_factory=list)
    """Files in the folders that were given and that are of an unknown kind."""

    @property
    def size_bytes(self) -> int:
        """About how much there is to read."""
        return sum(piece.size for part in self.parts for piece in part)


def find(sources: Sequence[str], asked: Asked) -> Texts:
    """Look for what the sources name: files, folders, patterns with *, or data sets that the `datasets` library opens.

    Raises DataError if there is nothing under a name, or it cannot be opened.
    """
    files: list[tuple[Kind, Path] | str] = []
    texts = Texts([], asked, {})
    for source in sources:
        files += _found(source, asked, texts.left_out)
    stated = {path: _size(path) for _, path in (file for file in files if not isinstance(file, str))}
    datasets = {name: _dataset(name, asked) for name in dict.fromkeys(file for file in files if isinstance(file, str))}
    total = sum(stated.values()) + sum(int(dataset.data.nbytes) for dataset in datasets.values())
    most = min(max(_SMALLEST_PIECE, 1 << (total // _PIECES).bit_length()), _LARGEST_PIECE)
    texts.datasets = datasets
    texts.parts = list(_together(_pieces(files, datasets, asked, most), most))
    return texts


def _found(source: str, asked: Asked, left_out: list[Path]) -> list[tuple[Kind, Path] | str]:
    path = Path(source).expanduser()
    if path.is_file():
        if asked.kind is None and path.suffix in _BUILDERS:
            return [source]
        kind = asked.kind or kind_of(path)
        if kind is None:
            known = ", ".join([*KINDS, *_BUILDERS])
            raise DataError(f"{path} has an unknown suffix (known: {known}; all but the last three may also end in .gz, .bz2, "
                ".xz or .zst): give --format text, jsonl or parquet")  # fmt: skip
        return [(kind, path)]
    if path.is_dir():
        if any(path.glob("state.json")) or (path / "dataset_dict.json").is_file():
            return [source]
        within = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
        kinds = [(asked.kind or kind_of(file), file) for file in within]
        left_out += [file for kind, file in kinds if kind is None]
        found: list[tuple[Kind, Path] | str] = [(kind, file) for kind, file in kinds if kind is not None]
        if not found:
            raise DataError(f"{path} contains no text files ({', '.join(KINDS)}): for other suffixes give --format text")
        return found
    if any(sign in source for sign in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise DataError(f"{source}: no file matches")
        return [one for match in matches for one in _found(glob.escape(match) if match == source else match, asked, left_out)]
    if path.suffix in (*KINDS, *COMPRESSED, *_BUILDERS) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(f"{source}: no such file or folder")
    return [source]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def kind_of(path: Path) -> Kind | None:
    """Return what a file holds, by its ending; None: no known kind."""
    ending = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    kind = KINDS.get(ending)
    return None if kind == "parquet" and path.suffix in COMPRESSED else kind


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _pieces(files: Sequence[tuple[Kind, Path] | str], datasets: Mapping[str, Any], asked: Asked, most: int) -> Iterator[Piece]:
    for file in files:
        if isinstance(file, str):
            yield from _of_dataset(file, datasets[file], most)
            continue
        kind, path = file
        told = path.stat()
        stamp = f"{told.st_size} {told.st_mtime_ns}"
        if kind == "parquet":
            yield from _of_parquet(path, stamp, most)
        elif path.suffix in COMPRESSED or not _is_divisible(kind, asked.separator):
            yield Piece(kind, str(path), 0, told.st_size, told.st_size, stamp)
        else:
            for start in range(0, told.st_size, most):
                stop = min(start + most, told.st_size)
                yield Piece(kind, str(path), start, stop, stop - start, stamp)


def _is_divisible(kind: Kind, separator: str | None) -> bool:
    """Whether a file can be read from the middle: a separator that can overlap itself, as two newlines, is read in order."""
    if kind == "jsonl":
        return True
    return separator is not None and not any(separator.startswith(separator[-n:]) for n in range(1, len(separator)))


def _of_parquet(path: Path, stamp: str, most: int) -> Iterator[Piece]:
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {_first_line(error)}") from None
    sizes = [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    start = size = 0
    for group, more in enumerate(sizes):
        if size and size + more > most:
            yield Piece("parquet", str(path), start, group, size, stamp)
            start, size = group, 0
        size += more
    if start < len(sizes):
        yield Piece("parquet", str(path), start, len(sizes), size, stamp)


def _of_dataset(name: str, dataset: Any, most: int) -> Iterator[Piece]:
    rows, size = len(dataset), int(dataset.data.nbytes)
    step = max(1, rows * most // max(size, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Piece("datasets", name, start, stop, size * (stop - start) // rows, dataset._fingerprint)


def _together(pieces: Iterator[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    part: list[Piece] = []
    for piece in pieces:
        if part and sum(other.size for other in part) + piece.size > most:
            yield tuple(part)
            part = []
        part.append(piece)
    if part:
        yield tuple(part)


def _dataset(name: str, asked: Asked) -> Any:
    """Open a data set of the `datasets` library. Raises DataError."""
    from datasets.exceptions import DatasetsError

    path = Path(name).expanduser()
    why = None if path.exists() else offline.why()
    try:
        with offline.datasets_offline() if why else nullcontext():
            dataset = _loader(name, path, asked)()
    except (OSError, ValueError, DatasetsError) as error:
        what = "cannot be opened" if path.exists() else "is not a file or folder here, and the datasets library cannot open it"
        raise DataError(f"{name} {what} (--split {asked.split}): {why or _first_line(error)}") from error
    commits = {Path(file["filename"]).parent.name for file in dataset.cache_files}
    if re.fullmatch(r"[0-9a-f]{40}", asked.revision or "") and not path.exists() and commits != {asked.revision}:
        # Off the network the library takes what was cached last, whatever revision is asked for.
        raise DataError(f"{name}: --revision {asked.revision} was asked for, and {', '.join(sorted(commits))} was opened from "
            "the cache; download that revision on a machine with a network")  # fmt: skip
    missing = [column for column in asked.columns if column not in dataset.column_names]
    if missing:
        raise no_column(name, missing[0], dataset.column_names)
    if not asked.columns:
        return dataset
    return dataset.select_columns([name for name in dataset.column_names if name in (*asked.columns, *asked.more_columns)])


def _loader(name: str, path: Path, asked: Asked) -> Callable[[], Any]:
    import datasets

    if path.is_file():
        return lambda: datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train")
    if path.is_dir():
        return lambda: datasets.load_from_disk(str(path if (path / "state.json").is_file() else path / asked.split))
    return lambda: datasets.load_dataset(name, asked.config, split=asked.split, revision=asked.revision)


def no_column(where: str, column: str, there: Sequence[str]) -> DataError:
    """Return what to say of a column that is not there."""
    return DataError(f"{where} has no column {column!r}; there are {', '.join(map(repr, there))}: choose one with --column")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
