"""Finds texts: files, folders, patterns and data sets, split into pieces of which one process reads each.

How they are split depends on the sources alone. A row is a document, or an example of a prompt and its answer.
"""

from __future__ import annotations

import glob
import itertools
import json
import mmap
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.data.data_files import (
    SUFFIXES,
    NotRead,
    check_columns,
    check_complete,
    check_names,
    first_line,
    is_compressed,
    open_decompressed,
    reading,
    regular_file,
    walk,
)
from app.environment.topology import listed
from app.errors import DataError, UsageError
from app.files import other_libraries

Kind = Literal["text", "jsonl", "parquet", "datasets"]
KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
"""The kind of a file, by its suffix; before .gz, .bz2, .xz or .zst."""
_BUILDERS = {".csv": "csv", ".arrow": "arrow"}
"""Files that the `datasets` library reads."""
Row = tuple[int, Mapping[str, Any] | str]
"""A row's position in its file, for `place`, and its columns, or the reason why it cannot be read."""
_ROWS = 1000
_PIECE_BYTES = 1 << 22
_ALL = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options for reading sources and dividing them into splits."""

    columns: tuple[str, ...] = ("text",)
    """Columns that each row must have."""
    prompts: bool = False
    """Rows are examples of prompts and answers: the other columns are read too."""
    skip_unreadable: bool = False
    """Leave out rows that cannot be read."""
    kind: Kind | None = None
    """Kind of all files; None: by their suffixes."""
    separator: str | None = None
    """Text between the documents of a text file; None: a file is a document."""
    config: str | None = None
    """Configuration, revision and split (None: train) of data sets of the `datasets` library."""
    revision: str | None = None
    split: str | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the training documents that become validation and test documents; 0 for none."""

    def is_read(self, column: str) -> bool:
        """Return True if a column is read."""
        return self.prompts or column in self.columns


class FileRange(NamedTuple):
    """Documents that one process reads: all or some of a file, some of a data set."""

    kind: Kind
    path: str
    """The file, or the name of the data set."""
    start: int
    """The first byte, row group or row; a document belongs to the piece in which it begins."""
    stop: int
    size_bytes: int
    """Approximate amount of data to read."""
    dataset: Any = None
    """The opened data set."""


class Texts(NamedTuple):
    """Texts that were found."""

    parts: list[tuple[FileRange, ...]]
    """Pieces in their order; small ones are grouped."""
    not_read: list[str]
    """A sentence for each folder with files that are not read."""


def find(sources: Sequence[str], options: SourceOptions) -> Texts:
    """Find the texts in files, folders, patterns with *, and data sets that the `datasets` library opens.

    Raises DataError if a source does not exist or cannot be opened, and UsageError for options of data sets if there are only
    files.
    """
    not_read: list[str] = []
    files = [file for source in sources for file in _files(source, options, not_read)]
    if not any(kind == "datasets" for kind, _ in files):
        for name in ("config", "revision", "split"):
            if (value := getattr(options, name)) is not None:
                raise UsageError(f"the {name} {value} is for data sets, and all sources are files: leave the option out")
    pieces = [piece for kind, path in files for piece in _pieces(kind, path, options)]
    if not any(piece.size_bytes for piece in pieces):
        raise DataError(f"{listed([path for _, path in files])} {'is' if len(files) == 1 else 'are'} empty: give other sources")
    return Texts(list(_grouped(pieces)), not_read)


def _files(source: str, options: SourceOptions, not_read: list[str]) -> list[tuple[Kind, str]]:
    path = Path(source).expanduser()
    if path.is_file():
        kind = options.kind or _kind(path)
        if kind is None:
            known = ", ".join([*KINDS, *_BUILDERS])
            raise DataError(f"{path} has an unknown suffix (known: {known}; all but the last three may also end in .gz, .bz2, "
                ".xz or .zst): give --format text, jsonl or parquet")  # fmt: skip
        return [(kind, str(path))]
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return [("datasets", source)]
        return _files_below(path, options, not_read)
    if any(sign in source for sign in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise DataError(f"{source}: no file matches")
        check_complete(map(Path, matches), pattern=str(path))
        names = [glob.escape(match) if match == source else match for match in matches]
        return [file for name in names for file in _files(name, options, not_read)]
    if path.suffix.lower() in (*KINDS, *SUFFIXES, *_BUILDERS) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(f"{source}: no such file or folder")
    return [("datasets", source)]


def _files_below(top: Path, options: SourceOptions, not_read: list[str]) -> list[tuple[Kind, str]]:
    others, found = NotRead(), list[tuple[Kind, str]]()
    for path in sorted(Path(folder.name, name) for folder in walk(top, "", others) for name in folder.files):
        kind = options.kind or _kind(path)
        if kind is None or kind == "datasets":
            others.add_ending(str(path))
        else:
            found.append((kind, str(top / path)))
    not_read += [f"{top}: {others}"] if others else []
    if not found:
        raise DataError(f"{top} contains no text files ({', '.join(KINDS)}): for other suffixes give --format text")
    check_complete(Path(path) for _, path in found)
    return found


def _kind(path: Path) -> Kind | None:
    if path.suffix.lower() in _BUILDERS:
        return "datasets"
    kind = KINDS.get((path.with_suffix("") if is_compressed(path) else path).suffix.lower())
    return None if kind == "parquet" and is_compressed(path) else kind


def _pieces(kind: Kind, path: str, options: SourceOptions) -> Iterator[FileRange]:
    if kind == "datasets":
        dataset = _dataset(path, options)
        rows, size = len(dataset), int(dataset.data.nbytes)
        step = max(1, rows * _PIECE_BYTES // max(size, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield FileRange(kind, path, start, stop, size * (stop - start) // rows, dataset)
        return
    with reading(path):
        size = regular_file(Path(path)).st_size
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        with reading(path, errors=(ValueError, pyarrow.ArrowException)):
            metadata = pyarrow.parquet.read_metadata(path)
        for group in range(metadata.num_row_groups):
            yield FileRange("parquet", path, group, group + 1, metadata.row_group(group).total_byte_size)
    elif is_compressed(Path(path)) or not (kind == "jsonl" or _is_divisible(options.separator)):
        yield FileRange(kind, path, 0, _ALL, size)
    else:
        for start in range(0, size, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, size)
            yield FileRange(kind, path, start, stop, stop - start)


def _is_divisible(separator: str | None) -> bool:
    """Return True if a text file can be read from the middle: not if its separator can overlap itself, as two newlines can."""
    return separator is not None and not any(separator.startswith(separator[-n:]) for n in range(1, len(separator)))


def _grouped(pieces: Iterable[FileRange]) -> Iterator[tuple[FileRange, ...]]:
    part: list[FileRange] = []
    size = 0
    for piece in pieces:
        if part and size + piece.size_bytes > _PIECE_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(piece)
        size += piece.size_bytes
    if part:
        yield tuple(part)


def _dataset(name: str, options: SourceOptions) -> Any:
    """Open a data set of the `datasets` library. Raises DataError."""
    from datasets.exceptions import DatasetsError

    path, split = Path(name).expanduser(), options.split or "train"
    if path.is_file():
        check_columns(path, options.columns)
    try:
        if path.is_file():
            dataset = other_libraries.data_set(_BUILDERS[path.suffix.lower()], data_files=str(path), split="train")
        elif path.is_dir():
            dataset = other_libraries.saved_data_set(path if (path / "state.json").is_file() else path / split)
        else:
            dataset = other_libraries.data_set(name, options.config, split=split, revision=options.revision)
    except (OSError, ValueError, DatasetsError) as error:
        what = "cannot be opened" if path.exists() else "is not a file or folder here, and the datasets library cannot open it"
        raise DataError(f"{name} {what} (--split {split}): {first_line(error)}") from error
    commits = {Path(file["filename"]).parent.name for file in dataset.cache_files}
    if re.fullmatch(r"[0-9a-f]{40}", options.revision or "") and not path.exists() and commits != {options.revision}:
        # Without a network the library opens the revision that was cached last, whatever revision is requested.
        raise DataError(f"{name}: --revision {options.revision} was requested, and {', '.join(sorted(commits))} was opened "
            "from the cache; download that revision on a machine with a network")  # fmt: skip
    _check_columns(name, options, dataset.column_names)
    return dataset.select_columns([column for column in dataset.column_names if options.is_read(column)])


def _missing_column(options: SourceOptions, columns: Iterable[str]) -> str | None:
    """Return a phrase on the first column that does not exist."""
    missing = next((column for column in options.columns if column not in columns), None)
    return missing and f"no column {missing!r}; there are {', '.join(map(repr, columns))}: choose one with --column"


def _check_columns(where: str, options: SourceOptions, columns: Sequence[str]) -> None:
    if phrase := _missing_column(options, columns):
        raise DataError(f"{where} has {phrase}")


def rows(piece: FileRange, options: SourceOptions) -> Iterator[Row]:
    """Return the rows of a piece. Raises DataError if the file cannot be read to its end."""
    readers = {"text": _text_rows, "jsonl": _json_rows, "parquet": _parquet_rows, "datasets": _dataset_rows}
    return readers[piece.kind](piece, options)


def place(piece: FileRange, position: int) -> str:
    """Return the location of a row, in words. Reads the file up to there."""
    if piece.kind != "jsonl":
        return f"{piece.path}, {'byte' if piece.kind == 'text' else 'row'} {position}"
    with open_decompressed(Path(piece.path)) as file:
        return f"{piece.path}, line {1 + sum(1 for _ in _lines(file, 0, position))}"


def _json_rows(piece: FileRange, options: SourceOptions) -> Iterator[Row]:
    with open_decompressed(Path(piece.path)) as file:
        for position, line in _lines(file, piece.start, piece.stop):
            if position == 0 and line.strip() in (b"{", b"[", b"[{"):
                raise DataError(
                    f"{piece.path} is indented JSON, and each line must hold one whole object: convert it, for example with "
                    f"`jq -c '{'.[]' if line.startswith(b'[') else '.'}'`"
                )
            if line.strip():
                yield position, _json_row(line, options)


def _lines(file: Any, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that begin at `start` .. `stop` - 1, with their positions."""
    if start:
        file.seek(start - 1)
        start = start - 1 + len(file.readline())
    for line in file:
        if start >= stop:
            return
        yield start, line
        start += len(line)


def _json_row(line: bytes, options: SourceOptions) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8 as well
        return f"not JSON ({error})"
    if not isinstance(row, dict):
        return f"not a JSON object with columns, but {type(row).__name__}: JSON lines need one object per line"
    return _missing_column(options, row) or row


def _text_rows(piece: FileRange, options: SourceOptions) -> Iterator[Row]:
    """Yield the documents that begin at `start` .. `stop` - 1; the first at 0, each other one after a separator."""
    path = Path(piece.path)

    def row(content: bytes) -> Mapping[str, Any] | str:
        try:
            return {(*options.columns, "text")[0]: content.decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            return f"not UTF-8 ({error.reason} {error.start} bytes further on)"

    with open_decompressed(path) as file:
        if options.separator is None or not piece.size_bytes:
            yield 0, row(file.read())
            return
        separator = options.separator.encode()
        content = file.read() if is_compressed(path) else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin, stop = 0, min(piece.stop, len(content))
        if piece.start:
            found = content.find(separator, max(0, piece.start - len(separator)))
            begin = stop if found < 0 else found + len(separator)
        while begin < stop:
            end = content.find(separator, begin)
            yield begin, row(content[begin : None if end < 0 else end])
            begin = stop if end < 0 else end + len(separator)


def _parquet_rows(piece: FileRange, options: SourceOptions) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    errors = (ValueError, pyarrow.ArrowException)  # ValueError: text that is not UTF-8
    with reading(piece.path, errors=errors), pyarrow.parquet.ParquetFile(piece.path) as file:
        names = file.schema_arrow.names
        _check_columns(piece.path, options, names)
        columns = [name for name in names if options.is_read(name)]
        check_names(columns, (), piece.path)
        numbers = itertools.count(sum(file.metadata.row_group(group).num_rows for group in range(piece.start)))
        for batch in file.iter_batches(_ROWS, row_groups=list(range(piece.start, piece.stop)), columns=columns):
            yield from zip(numbers, batch.to_pylist())  # noqa: B905 - the numbers do not end


def _dataset_rows(piece: FileRange, options: SourceOptions) -> Iterator[Row]:  # noqa: ARG001
    import pyarrow

    for start in range(piece.start, piece.stop, _ROWS):
        with reading(piece.path, errors=(ValueError, pyarrow.ArrowException)):
            columns = piece.dataset[start : min(start + _ROWS, piece.stop)]
        for number, values in enumerate(zip(*columns.values(), strict=True), start):
            yield number, dict(zip(columns, values, strict=True))
