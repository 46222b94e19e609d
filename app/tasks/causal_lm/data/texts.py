"""Where texts are: files, folders and data sets, found in their order and divided into pieces, and the rows of a piece.

How they are divided depends on the sources alone, never on who reads them. A row is a document or an example.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.data.data_files import (
    SUFFIXES,
    NotRead,
    check_columns,
    check_complete,
    check_names,
    damaged_file_error,
    is_compressed,
    open_decompressed,
    walk,
)
from app.errors import DataError
from app.files import other_libraries

Kind = Literal["text", "jsonl", "parquet", "datasets"]
KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
"""The kind of a file, by its suffix; before .gz, .bz2, .xz or .zst."""
# What the `datasets` library reads by itself of what is a file.
_BUILDERS = {".csv": "csv", ".arrow": "arrow"}
Row = tuple[int, Mapping[str, Any] | str]
"""A row's position in its piece, for `place`, and its columns, or the reason why it cannot be read."""
_ROWS = 1000
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
    skip_unreadable: bool = False
    """Leave out what cannot be read."""


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
    not_read: list[str] = field(default_factory=list)
    """A sentence for each folder in which there is something that is not read."""


def find(sources: Sequence[str], asked: Asked) -> Texts:
    """Look for what the sources name: files, folders, patterns with *, or data sets that the `datasets` library opens.

    Raises DataError if there is nothing under a name, or it cannot be opened.
    """
    files: list[tuple[Kind, Path] | str] = []
    texts = Texts([], asked, {})
    for source in sources:
        files += _found(source, asked, texts.not_read)
    stated = {path: _size(path) for _, path in (file for file in files if not isinstance(file, str))}
    datasets = {name: _dataset(name, asked) for name in dict.fromkeys(file for file in files if isinstance(file, str))}
    total = sum(stated.values()) + sum(int(dataset.data.nbytes) for dataset in datasets.values())
    most = min(max(_SMALLEST_PIECE, 1 << (total // _PIECES).bit_length()), _LARGEST_PIECE)
    texts.datasets = datasets
    texts.parts = list(_together(_pieces(files, datasets, asked, most), most))
    return texts


def _found(source: str, asked: Asked, not_read: list[str]) -> list[tuple[Kind, Path] | str]:
    path = Path(source).expanduser()
    if path.is_file():
        if asked.kind is None and path.suffix.lower() in _BUILDERS:
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
        return _below(path, asked, not_read)
    if any(sign in source for sign in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise DataError(f"{source}: no file matches")
        check_complete(map(Path, matches), wanted=lambda missing: fnmatch.fnmatch(str(missing), str(path)))
        return [one for match in matches for one in _found(glob.escape(match) if match == source else match, asked, not_read)]
    if path.suffix.lower() in (*KINDS, *SUFFIXES, *_BUILDERS) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(f"{source}: no such file or folder")
    return [source]


def _below(top: Path, asked: Asked, not_read: list[str]) -> list[tuple[Kind, Path] | str]:
    others, found = NotRead(), list[tuple[Kind, Path] | str]()
    for path in sorted(Path(folder.name, name) for folder in walk(top, "", others) for name in folder.files):
        kind = asked.kind or kind_of(path)
        if kind is None:
            others.add_ending(str(path))
        else:
            found.append((kind, top / path))
    not_read += [f"{top}: {others}"] if others else []
    if not found:
        raise DataError(f"{top} contains no text files ({', '.join(KINDS)}): for other suffixes give --format text")
    check_complete(Path(file[1]) for file in found)
    return found


def kind_of(path: Path) -> Kind | None:
    """Return what a file holds, by its ending; None: no known kind."""
    kind = KINDS.get((path.with_suffix("") if is_compressed(path) else path).suffix.lower())
    return None if kind == "parquet" and is_compressed(path) else kind


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _pieces(files: Sequence[tuple[Kind, Path] | str], datasets: Mapping[str, Any], asked: Asked, most: int) -> Iterator[Piece]:
    for file in files:
        if isinstance(file, str):
            yield from _dataset_pieces(file, datasets[file], most)
            continue
        kind, path = file
        told = path.stat()
        stamp = f"{told.st_size} {told.st_mtime_ns}"
        if kind == "parquet":
            yield from _parquet_pieces(path, stamp, asked, most)
        elif is_compressed(path) or not (kind == "jsonl" or _is_divisible(asked.separator)):
            yield Piece(kind, str(path), 0, told.st_size, told.st_size, stamp)
        else:
            for start in range(0, told.st_size, most):
                stop = min(start + most, told.st_size)
                yield Piece(kind, str(path), start, stop, stop - start, stamp)


def _is_divisible(separator: str | None) -> bool:
    """Return whether a text file can be read from the middle: not if its separator can overlap itself, as two newlines can."""
    return separator is not None and not any(separator.startswith(separator[-n:]) for n in range(1, len(separator)))


def _parquet_pieces(path: Path, stamp: str, asked: Asked, most: int) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.read_metadata(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if not asked.skip_unreadable:
            raise DataError(f"{path} is not a readable parquet file: {_first_line(error)}") from None
        yield Piece("parquet", str(path), 0, 0, 0, stamp)  # whoever reads it counts it
        return
    sizes = [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    start = size = 0
    for group, more in enumerate(sizes):
        if size and size + more > most:
            yield Piece("parquet", str(path), start, group, size, stamp)
            start, size = group, 0
        size += more
    if start < len(sizes):
        yield Piece("parquet", str(path), start, len(sizes), size, stamp)


def _dataset_pieces(name: str, dataset: Any, most: int) -> Iterator[Piece]:
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
    if path.is_file():
        check_columns(path, (*asked.columns, *asked.more_columns))
    try:
        if path.is_file():
            dataset = other_libraries.data_set(_BUILDERS[path.suffix.lower()], data_files=str(path), split="train")
        elif path.is_dir():
            dataset = other_libraries.saved_data_set(path if (path / "state.json").is_file() else path / asked.split)
        else:
            dataset = other_libraries.data_set(name, asked.config, split=asked.split, revision=asked.revision)
    except (OSError, ValueError, DatasetsError) as error:
        what = "cannot be opened" if path.exists() else "is not a file or folder here, and the datasets library cannot open it"
        raise DataError(f"{name} {what} (--split {asked.split}): {_first_line(error)}") from error
    commits = {Path(file["filename"]).parent.name for file in dataset.cache_files}
    if re.fullmatch(r"[0-9a-f]{40}", asked.revision or "") and not path.exists() and commits != {asked.revision}:
        # Off the network the library takes what was cached last, whatever revision is asked for.
        raise DataError(f"{name}: --revision {asked.revision} was asked for, and {', '.join(sorted(commits))} was opened from "
            "the cache; download that revision on a machine with a network")  # fmt: skip
    missing = [column for column in asked.columns if column not in dataset.column_names]
    if missing:
        raise _no_column(name, missing[0], dataset.column_names)
    if not asked.columns:
        return dataset
    return dataset.select_columns([name for name in dataset.column_names if name in (*asked.columns, *asked.more_columns)])


def _no_column(where: str, column: str, there: Sequence[str]) -> DataError:
    """Return what to say of a column that is not there."""
    return DataError(f"{where} has no column {column!r}; there are {', '.join(map(repr, there))}: choose one with --column")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def rows(piece: Piece, texts: Texts) -> Iterator[Row]:
    """Yield the rows of a piece. Raises DataError if the file cannot be read to its end."""
    if piece.kind == "datasets":
        yield from _dataset_rows(piece, texts.datasets[piece.path])
    else:
        reader = {"parquet": _parquet_rows, "jsonl": _json_rows, "text": _text_rows}[piece.kind]
        yield from reader(piece, texts.asked)


def place(piece: Piece, number: int) -> str:
    """Return where a row is, in words. Reads the file up to there."""
    if piece.kind == "datasets":
        return f"{piece.path}, row {piece.start + number}"
    if piece.kind == "parquet":
        import pyarrow.parquet

        about = pyarrow.parquet.read_metadata(piece.path)
        return f"{piece.path}, row {sum(about.row_group(group).num_rows for group in range(piece.start)) + number}"
    if piece.kind == "text":
        return f"{piece.path}, byte {number}"
    lines = 0
    if piece.start:
        with Path(piece.path).open("rb") as file:
            lines = sum(1 for _ in _lines(file, 0, piece.start))
    return f"{piece.path}, line {lines + number + 1}"


def _json_rows(piece: Piece, asked: Asked) -> Iterator[Row]:
    path = Path(piece.path)
    with open_decompressed(path) as file:
        lines = iter(file) if is_compressed(path) else _lines(file, piece.start, piece.stop)
        for number, line in enumerate(lines):
            if line.strip():
                yield number, _parsed(line, asked)


def _lines(file: Any, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines of a file that begin at `start` .. `stop` - 1."""
    if start:
        file.seek(start - 1)
        start = start - 1 + len(file.readline())
    for line in file:
        if start >= stop:
            return
        yield line
        start += len(line)


def _parsed(line: bytes, asked: Asked) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        return f"not JSON ({error})"
    if not isinstance(row, dict):
        return f"not a JSON object with columns, but {type(row).__name__}: JSON lines need one object per line"
    for column in asked.columns:
        if column not in row:
            return f"no column {column!r}; there are {', '.join(map(repr, row))}: choose one with --column"
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a name is in it twice: json would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the name {twice!r} twice")
    return found


def _text_rows(piece: Piece, asked: Asked) -> Iterator[Row]:
    path = Path(piece.path)
    with open_decompressed(path) as file:
        if asked.separator is None:
            yield 0, _text(file.read(), asked)
        elif is_compressed(path):
            content = file.read()
            yield from _separated(content, 0, len(content), asked.separator.encode(), asked)
        elif piece.stop > piece.start:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                yield from _separated(mapped, piece.start, piece.stop, asked.separator.encode(), asked)


def _separated(content: bytes | mmap.mmap, start: int, stop: int, between: bytes, asked: Asked) -> Iterator[Row]:
    """Yield the documents that begin at `start` .. `stop` - 1; the first at 0, each other one after a separator."""
    begin = 0
    if start:
        found = content.find(between, max(0, start - len(between)))
        begin = stop if found < 0 else found + len(between)
    while begin < stop:
        end = content.find(between, begin)
        yield begin, _text(content[begin : None if end < 0 else end], asked)
        begin = stop if end < 0 else end + len(between)


def _text(content: bytes, asked: Asked) -> Mapping[str, Any] | str:
    try:
        return {asked.columns[0] if asked.columns else "text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} {error.start} bytes further on): convert it"


def _parquet_rows(piece: Piece, asked: Asked) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            there = file.schema_arrow.names
            for column in asked.columns:
                if column not in there:
                    raise _no_column(piece.path, column, there)
            columns = [name for name in there if not asked.columns or name in (*asked.columns, *asked.more_columns)]
            check_names(columns, (), piece.path)
            numbers = itertools.count()
            for batch in file.iter_batches(_ROWS, row_groups=list(range(piece.start, piece.stop)), columns=columns):
                yield from zip(numbers, batch.to_pylist())  # noqa: B905 - the numbers do not end
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: text that is not UTF-8
        raise damaged_file_error(piece.path, error) from error


def _dataset_rows(piece: Piece, dataset: Any) -> Iterator[Row]:
    import pyarrow

    for start in range(piece.start, piece.stop, _ROWS):
        try:
            columns = dataset[start : min(start + _ROWS, piece.stop)]
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise damaged_file_error(piece.path, error) from error
        names = list(columns)
        for number, values in enumerate(zip(*columns.values(), strict=True), start - piece.start):
            yield number, dict(zip(names, values, strict=True))
