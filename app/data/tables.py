"""Tables in files: a column that is there twice is refused, because one library reads the first and another one the last."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from app.errors import DataError


def check_columns(file: Path, wanted: Collection[str]) -> None:
    """Raise DataError if one of the columns, or any if none are named, is twice in a table: .parquet, .arrow, .csv."""
    import pyarrow

    readers = {".parquet": _of_parquet, ".arrow": _of_arrow, ".csv": _of_csv}
    try:
        names = readers.get(file.suffix.lower(), lambda _: ())(file)
    except (OSError, ValueError, pyarrow.ArrowException, csv.Error, StopIteration):
        return  # the library that reads it says what is wrong
    check_names(names, wanted, str(file))


def check_names(names: Sequence[str], wanted: Collection[str], where: str) -> None:
    """Raise DataError if one of the columns, or any if none are named, is there twice."""
    twice = [name for name, count in Counter(names).items() if count > 1 and (not wanted or name in wanted)]
    if twice:
        raise DataError(f"{where} has the column {twice[0]!r} twice: rename or remove one of them")


def _of_parquet(file: Path) -> list[str]:
    import pyarrow.parquet

    names: list[str] = pyarrow.parquet.read_schema(file).names
    return names


def _of_arrow(file: Path) -> list[str]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            names: list[str] = pyarrow.ipc.open_stream(source).schema.names
        except pyarrow.ArrowInvalid:  # the format with an index at its end
            names = pyarrow.ipc.open_file(source).schema.names
    return names


def _of_csv(file: Path) -> list[str]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return next(csv.reader(lines))
