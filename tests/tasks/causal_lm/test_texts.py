"""Texts: the same documents from every kind of file, however they are divided, and a sentence for what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DataError, UsageError
from app.tasks.causal_lm.data import texts
from app.tasks.causal_lm.data.texts import SourceOptions

TEXTS = ["Call me Ishmael.", "Grüße\nan den Wal \N{WHALE}\r\n", "", " ", "line\u2028separator\x85", "x" * 5000, "the end"]
END = "<|endoftext|>"


def read(sources: Sequence[Path | str], **options: Any) -> list[Any]:
    """Return all rows, or the reason for those that cannot be read."""
    asked = SourceOptions(**options)
    parts = texts.find([str(source) for source in sources], asked).parts
    rows = itertools.chain.from_iterable(texts.rows(piece, asked) for part in parts for piece in part)
    return [row if isinstance(row, str) else row[asked.columns[0]] for _, row in rows]


def lines(column: str = "text") -> bytes:
    return "".join(json.dumps({"number": number, column: text}) + "\n" for number, text in enumerate(TEXTS)).encode()


def as_parquet(path: Path) -> None:
    table = pyarrow.table({"number": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def two_frames(content: bytes) -> bytes:
    zstd = pytest.importorskip("backports.zstd")
    return b"".join(zstd.compress(part) for part in (content[:100], content[100:]))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(lines()),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(lines()[:50]) + gzip.compress(lines()[50:])),
    "a.ndjson.xz": lambda path: path.write_bytes(lzma.compress(lines())),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(lines())),
    "a.jsonl.zst": lambda path: path.write_bytes(two_frames(lines())),
    "a.parquet": as_parquet,
    "saved": lambda path: DatasetDict({"train": Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(path)),
    "saved_alone": lambda path: Dataset.from_dict({"text": TEXTS, "number": range(len(TEXTS))}).save_to_disk(str(path)),
    "a.txt": lambda path: path.write_bytes(END.join(TEXTS).encode()),
    "a.text.zst": lambda path: path.write_bytes(two_frames(END.join(TEXTS).encode())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_has_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert read([tmp_path / name], separator=END) == TEXTS


def test_files_in_folders_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "deep" / str(number)).mkdir(parents=True)
        (tmp_path / "deep" / str(number) / "a.txt").write_text(text, newline="")
    (tmp_path / "README.md").write_text("read me")
    assert read([tmp_path]) == TEXTS
    assert read([tmp_path / "deep" / "[12]" / "*.txt", tmp_path / "deep" / "0" / "a.txt"]) == [TEXTS[1], TEXTS[2], TEXTS[0]]
    assert read([tmp_path / "deep" / "*"]) == TEXTS
    assert read([tmp_path / "README.md"], kind="text") == ["read me"]


@settings(max_examples=150)
@given(st.lists(st.integers(1, 400), max_size=8), st.lists(st.text("ab<|>\n", max_size=12), min_size=1, max_size=12))
def test_a_document_is_read_once_wherever_a_file_is_split(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], documents: list[str]
) -> None:
    place = tmp_path_factory.mktemp("cut")
    asked = SourceOptions(separator="<|")
    (place / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (place / "a.txt").write_text("<|".join(documents))
    for name in ("a.jsonl", "a.txt"):
        if not (place / name).stat().st_size:
            continue
        ((whole,),) = texts.find([str(place / name)], asked).parts
        ends = sorted({0, whole.stop, *(cut for cut in cuts if cut < whole.stop)})
        pieces = [whole._replace(start=start, stop=stop) for start, stop in itertools.pairwise(ends)]
        right = list(texts.rows(whole, asked))
        assert [row for piece in pieces for row in texts.rows(piece, asked)] == right
        if name == "a.jsonl":
            places = [texts.place(piece, position) for piece in pieces for position, _ in texts.rows(piece, asked)]
            assert places == [f"{place / name}, line {number}" for number in range(1, len(documents) + 1)]


def test_large_files_are_split_and_small_ones_grouped(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_bytes(lines() * 3000)
    (tmp_path / "overlapping.txt").write_bytes(b"a\n\n\nb" * 1_000_000)
    for number in range(50):
        (tmp_path / f"small{number:02}.txt").write_text("small")
    found = texts.find([str(tmp_path)], SourceOptions(separator="\n\n"))
    names = [{Path(piece.path).name for piece in part} for part in found.parts]
    assert sum("large.jsonl" in part for part in names) > 3
    assert sum("overlapping.txt" in part for part in names) == 1, "two newlines can overlap: it is read from its beginning"
    assert sum("small00.txt" in part and "small49.txt" in part for part in names) == 1


BAD: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", lines() + b"{\n", {}, "not JSON (Expecting property name"),
    ("a.jsonl", b"[1, 2]\n", {}, "not a JSON object with columns, but list"),
    ("a.jsonl", lines("words"), {}, "no column 'text'; there are 'number', 'words': choose one with --column"),
    ("a.txt", b"good\xff", {}, "not UTF-8 (invalid start byte 4 bytes further on)"),
    ("a.jsonl.gz", gzip.compress(lines())[:-9], {}, "a.jsonl.gz cannot be read (Compressed file ended"),
    ("a.doc", b"", {}, "a.doc has an unknown suffix (known: .txt, "),
    ("a.parquet", b"", {"columns": ("words",)}, "has no column 'words'; there are 'number', 'text'"),
    ("a.jsonl", b"", {"split": "more"}, "the split more is for data sets, and all sources are files"),
    ("saved", b"", {"split": "more"}, "saved cannot be opened (--split more)"),
    ("nothing.jsonl", b"", {}, "nothing.jsonl: no such file or folder"),
    ("*.txt", b"", {}, "*.txt: no file matches"),
    (".", b"", {}, "contains no text files (.txt, "),
]


@pytest.mark.parametrize(("name", "content", "options", "text"), BAD)
def test_what_cannot_be_read_is_reported(tmp_path: Path, name: str, content: bytes, options: dict[str, Any], text: str) -> None:
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    elif name in WRITERS:
        WRITERS[name](path)
    elif name == "a.doc":
        path.touch()
    try:
        reasons = [row for row in read([path], **options) if row not in TEXTS]
    except (DataError, UsageError) as error:
        reasons = [str(error)]
    assert text in reasons[0]
