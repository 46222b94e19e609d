"""What is in a piece of `texts`: its rows, each a document or an example, in their order."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import mmap
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from app.data.extras import extra
from app.errors import DataError
from app.tasks.causal_lm.data.texts import COMPRESSED, Asked, Piece, no_column

Row = tuple[int, Mapping[str, Any] | str]
"""A row's position in its piece, for `place`, and its columns, or the reason why it cannot be read."""
_ROWS = 1000


def rows(piece: Piece, asked: Asked, datasets: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of a piece. Raises DataError if the file cannot be read to its end."""
    path = Path(piece.path)
    try:
        if piece.kind == "datasets":
            yield from _of_dataset(piece, datasets[piece.path])
        elif piece.kind == "parquet":
            yield from _of_parquet(piece, asked)
        elif piece.kind == "jsonl":
            yield from _of_lines(piece, path, asked)
        else:
            yield from _of_text(piece, path, asked)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"{path} cannot be read to its end ({str(error) or type(error).__name__}): it is truncated or damaged"
        ) from error


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


def _opened(path: Path) -> Any:
    """Return the file, uncompressed. Raises OSError, and DataError where a library is missing."""
    if path.suffix == ".zst":
        with extra(f"{path}: .zst", "samerun[text]"):
            import zstandard
        return io.BufferedReader(_Zstd(path, zstandard), 1 << 17)
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rb")


class _Zstd(io.RawIOBase):
    """A .zst file of one frame or several. The library's own reader takes a cut file for a whole one."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file, self._zstandard = path.open("rb", buffering=0), zstandard
        self._frame: Any = None
        self._left, self._out = b"", memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of the buffer; 0: the end. Raises OSError and EOFError."""
        while not self._out:
            content = self._left or self._file.read(1 << 17) or b""
            if not content:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            try:
                self._out = memoryview(self._frame.decompress(content))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._left = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._out))
        buffer[:count], self._out = self._out[:count], self._out[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _of_lines(piece: Piece, path: Path, asked: Asked) -> Iterator[Row]:
    is_whole = path.suffix in COMPRESSED
    with closing(_opened(path)) as file:
        lines = iter(file) if is_whole else _lines(file, piece.start, piece.stop)
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
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        return f"not JSON ({error})"
    if not isinstance(row, dict):
        return f"not a JSON object with columns, but {type(row).__name__}: JSON lines need one object per line"
    for column in asked.columns:
        if column not in row:
            return f"no column {column!r}; there are {', '.join(map(repr, row))}: choose one with --column"
    return row


def _of_text(piece: Piece, path: Path, asked: Asked) -> Iterator[Row]:
    if asked.separator is None:
        with closing(_opened(path)) as file:
            yield 0, _text(file.read(), asked)
        return
    between = asked.separator.encode()
    if path.suffix in COMPRESSED:
        with closing(_opened(path)) as file:
            content = file.read()
            yield from _separated(content, 0, len(content), between, asked)
    elif piece.stop > piece.start:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from _separated(content, piece.start, piece.stop, between, asked)


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


def _of_parquet(piece: Piece, asked: Asked) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            there = file.schema_arrow.names
            for column in asked.columns:
                if column not in there:
                    raise no_column(piece.path, column, there)
            columns = [name for name in there if not asked.columns or name in (*asked.columns, *asked.more_columns)]
            numbers = itertools.count()
            for batch in file.iter_batches(_ROWS, row_groups=list(range(piece.start, piece.stop)), columns=columns):
                yield from zip(numbers, batch.to_pylist())  # noqa: B905 - the numbers do not end
    except pyarrow.ArrowException as error:
        raise DataError(f"{piece.path} cannot be read: {error}") from error


def _of_dataset(piece: Piece, dataset: Any) -> Iterator[Row]:
    for start in range(piece.start, piece.stop, _ROWS):
        columns = dataset[start : min(start + _ROWS, piece.stop)]
        names = list(columns)
        for number, values in enumerate(zip(*columns.values(), strict=True), start - piece.start):
            yield number, dict(zip(names, values, strict=True))
