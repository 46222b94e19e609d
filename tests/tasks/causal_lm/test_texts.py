"""Texts: the same documents from every kind of file, however they are divided, and a sentence for what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DataError
from app.tasks.causal_lm.data import texts
from app.tasks.causal_lm.data.texts import Asked, Piece, Texts

TEXTS = ["Call me Ishmael.", "Grüße\nan den Wal \N{WHALE}\r\n", "", " ", "line\u2028separator\x85", "x" * 5000, "the end"]
END = "<|endoftext|>"


def read(sources: Sequence[Path | str], asked: Asked = Asked()) -> list[Any]:  # noqa: B008 - frozen
    """All rows, or of those that cannot be read why."""
    found = texts.find([str(source) for source in sources], asked)
    pieces = itertools.chain.from_iterable(found.parts)
    rows = itertools.chain.from_iterable(texts.rows(piece, found) for piece in pieces)
    return [row if isinstance(row, str) else row[asked.columns[0]] for _, row in rows]


def lines(column: str = "text") -> bytes:
    return "".join(json.dumps({"number": number, column: text}) + "\n" for number, text in enumerate(TEXTS)).encode()


def as_parquet(path: Path) -> None:
    table = pyarrow.table({"number": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def two_frames(content: bytes) -> bytes:
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
    assert read([tmp_path / name], Asked(separator=END)) == TEXTS


def test_files_in_folders_come_in_the_order_of_their_names_and_others_are_told(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "deep" / str(number)).mkdir(parents=True)
        (tmp_path / "deep" / str(number) / "a.txt").write_text(text, newline="")
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden.txt").write_text("no")
    assert read([tmp_path]) == TEXTS
    (said,) = texts.find([str(tmp_path)], Asked()).not_read
    assert said.startswith(f"{tmp_path}: 2 files or folders left out: 1 .md, 1 hidden, such as ")
    assert read([tmp_path / "deep" / "[12]" / "*.txt", tmp_path / "deep" / "0" / "a.txt"]) == [TEXTS[1], TEXTS[2], TEXTS[0]]
    assert read([tmp_path / "deep" / "*"]) == TEXTS
    assert read([tmp_path / "README.md"], Asked(kind="text")) == [""]


@settings(max_examples=150)
@given(
    cuts=st.lists(st.integers(1, 400), max_size=8), documents=st.lists(st.text("ab<|>\n", max_size=12), min_size=1, max_size=12)
)
def test_a_document_is_read_once_wherever_a_file_is_divided(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], documents: list[str]
) -> None:
    place = tmp_path_factory.mktemp("cut")
    asked = Asked(separator="<|")
    (place / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (place / "a.txt").write_text("<|".join(documents))
    for name in ("a.jsonl", "a.txt"):
        ((whole,),) = texts.find([str(place / name)], asked).parts or ((None,),)
        if whole is None:
            continue
        ends = sorted({0, whole.stop, *(cut for cut in cuts if cut < whole.stop)})
        pieces = [replace(whole, start=start, stop=stop) for start, stop in itertools.pairwise(ends)]
        rows = [row for piece in pieces for row in texts.rows(piece, Texts([], asked))]
        right = list(texts.rows(whole, Texts([], asked)))
        assert [row for _, row in rows] == [row for _, row in right]
        where = [texts.place(piece, number) for piece in pieces for number, _ in texts.rows(piece, Texts([], asked))]
        assert where == [texts.place(whole, number) for number, _ in right]


def test_large_files_are_divided_and_small_ones_put_together(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_bytes(lines() * 800)
    (tmp_path / "overlapping.txt").write_bytes(b"a\n\n\nb" * 500_000)
    for number in range(50):
        (tmp_path / f"small{number:02}.txt").write_text("small")
    found = texts.find([str(tmp_path)], Asked(separator="\n\n"))
    names = [{Path(piece.path).name for piece in part} for part in found.parts]
    assert sum("large.jsonl" in part for part in names) > 3
    assert sum("overlapping.txt" in part for part in names) == 1, "two newlines can overlap: it is read from its beginning"
    assert sum("small00.txt" in part and "small49.txt" in part for part in names) == 1
    assert read([tmp_path], Asked(separator="\n\n")) == [
        *TEXTS * 800,
        *"a\n\n\nb".join([""] * 500_001).split("\n\n"),
        *["small"] * 50,
    ]


def cut(content: bytes) -> bytes:
    return content[: len(content) - 9]


BAD: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("a.jsonl", lines() + b"{\n", {}, "not JSON (Expecting property name"),
    ("a.jsonl", b"[1, 2]\n", {}, "not a JSON object with columns, but list"),
    ("a.jsonl", lines("words"), {}, "no column 'text'; there are 'number', 'words': choose one with --column"),
    ("a.txt", b"good\xff", {}, "not UTF-8 (invalid start byte 4 bytes further on): convert it"),
    ("a.jsonl.gz", cut(gzip.compress(lines())), {}, "a.jsonl.gz cannot be read to its end (Compressed file ended"),
    ("a.jsonl.zst", cut(two_frames(lines())), {}, "a.jsonl.zst cannot be read to its end (Compressed file ended before"),
    ("a.jsonl.zst", b"nothing of the kind", {}, "a.jsonl.zst cannot be read to its end (Unable to decompress"),
    ("a.parquet", b"nothing of the kind", {}, "a.parquet is not a readable parquet file"),
    ("a.doc", b"", {}, "a.doc has an unknown suffix (known: .txt, "),
    ("a.parquet", b"", {"columns": ("words",)}, "has no column 'words'; there are 'number', 'text'"),
    ("saved", b"", {"split": "more"}, "saved cannot be opened (--split more)"),
]


@pytest.mark.parametrize(("name", "content", "asked", "text"), BAD)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, content: bytes, asked: dict[str, Any], text: str) -> None:
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    elif name in WRITERS:
        WRITERS[name](path)
    else:
        path.touch()
    try:
        said = [row for row in read([path], Asked(**asked)) if row not in TEXTS]
    except DataError as error:
        said = [str(error)]
    assert said
    assert text in said[0]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, text in {
        "nowhere/at/all": "nowhere/at/all: no such file or folder",
        "nothing.jsonl": "nothing.jsonl: no such file or folder",
        str(tmp_path / "*.jsonl"): "*.jsonl: no file matches",
        str(tmp_path / "empty"): "empty contains no text files (.txt, ",
    }.items():
        with pytest.raises(DataError) as caught:
            read([source])
        assert text in str(caught.value)


def test_places_are_named_as_people_count_them(tmp_path: Path) -> None:
    as_parquet(tmp_path / "a.parquet")
    assert texts.place(Piece("parquet", str(tmp_path / "a.parquet"), 1, 2, 0, ""), 1).endswith("a.parquet, row 3")
    assert texts.place(Piece("datasets", "name", 10, 20, 0, ""), 1) == "name, row 11"
    (tmp_path / "a.jsonl").write_bytes(lines())
    first = len(lines().split(b"\n")[0])
    assert texts.place(Piece("jsonl", str(tmp_path / "a.jsonl"), first, 10**6, 0, ""), 0).endswith("a.jsonl, line 2")
