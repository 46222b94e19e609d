"""`samerun data tokenize`: the same folder from any number of processes; and `samerun data inspect`."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from small_tokenizer import chapters, write_tokenizer

from app.checks import data as data_command
from app.errors import DataError, RecipeError, UsageError
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.command import main
from app.tasks.causal_lm.data.tokenizers import open_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book's paragraphs in two kinds of files, one large enough for several parts."""
    folder = tmp_path_factory.mktemp("book")
    paragraphs = [part for chapter in chapters() for part in [*chapter.split("\n\n"), " \n"]]
    half = len(paragraphs) // 2
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs[:half] * 6))
    (folder / "b.txt").write_text("<|>".join(paragraphs[half:]))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(folder: Path, split: str, tokenizer: str) -> list[str]:
    opened, reader = store.open_split(folder, split), open_tokenizer(tokenizer)
    return [reader.decode(part.tolist()) for part in np.split(opened.tokens, opened.documents[1:-1].astype(int))]


@pytest.mark.parametrize("packing", [[], ["--pack", "--sequence-length", "128"]])
def test_any_number_of_processes_writes_the_same_bytes(
    book: Path, bpe: str, tmp_path: Path, packing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--document-separator", "<|>", "--validation", "0.05", "--test", "0.02", "--tokenizer", bpe, *packing]
    for workers in ("1", "3"):
        assert main(["tokenize", str(book), *options, "--out", str(tmp_path / workers), "--workers", workers]) == 0
    assert files_in(tmp_path / "3") == files_in(tmp_path / "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    splits = store.about(tmp_path / "1")["splits"]
    documents = {split: entry["documents"] for split, entry in splits.items()}
    total = sum(documents.values())
    assert 0.03 * total < documents["validation"] < 0.07 * total
    assert 0.01 * total < documents["test"] < 0.035 * total
    source = [json.loads(line)["text"] for line in (book / "a.jsonl").read_text().splitlines()]
    source = [text for text in source + (book / "b.txt").read_text().split("<|>") if text.strip()]
    texts = {split: texts_of(tmp_path / "1", split, bpe) for split in documents}
    assert sorted(itertools.chain.from_iterable(texts.values())) == sorted(source)
    for found in texts.values():
        rest = iter(source)
        assert all(text in rest for text in found), "the order is that of the sources"
    assert sum(entry["bytes"] for entry in splits.values()) == sum(len(text.encode()) for text in source)
    report = capsys.readouterr().out
    assert f"train: {documents['train']:,} documents, " in report
    assert "empty documents left out: " in report


def test_rows_that_cannot_be_read_are_refused_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_bytes(b'{"text": "good"}\n\n{"text": 3}\n{"text": "\\ud800"}\n{\n{"text": "last"}\n{"text": null}\n')
    command = ["tokenize", str(bad), "--out", str(out), "--workers", "2"]
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: column 'text' holds int, not text\. Correct it, or skip"):
        main(command)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
    assert main([*command, "--skip-unreadable"]) == 0
    assert texts_of(out, "train", "bytes") == ["good", "last"]
    assert "empty documents left out: 1\nunreadable rows left out: 3\n" in capsys.readouterr().out


def test_splits_may_have_sources_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "held", "last"):
        (tmp_path / f"{name}.txt").write_text(f"{name} \N{WHALE}")
    options = ["--validation-source", str(tmp_path / "held.txt"), "--test-source", str(tmp_path / "last.txt")]
    assert main(["tokenize", str(tmp_path / "train.txt"), *options, "--out", str(tmp_path / "out")]) == 0
    assert "\nvalidation: 1 document, 10 tokens, " in capsys.readouterr().out
    found = [texts_of(tmp_path / "out", split, "bytes") for split in ("train", "validation", "test")]
    assert found == [["train \N{WHALE}"], ["held \N{WHALE}"], ["last \N{WHALE}"]]


REFUSED: list[tuple[list[str], type[Exception], str]] = [
    (["--validation", "0.01", "--validation-source", "b"], UsageError, "--validation uses training documents, and --valid"),
    (["--sequence-length", "9"], UsageError, "--sequence-length is for packed rows"),
    (["--prompts"], DataError, "line 1: the row has the columns 'text', neither prompt and completion nor messages"),
    (["--validation", "0.01"], DataError, "the split validation would be empty: documents that can be used: 2"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_what_cannot_be_tokenized_is_refused(tmp_path: Path, options: list[str], error: type[Exception], text: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    command = ["tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(error, match=text):
        main([*command, *options])
    assert not (tmp_path / "out").exists()


WITHOUT_TEXT: list[tuple[str, str | None, str]] = [
    ("a.txt", "", r"a\.txt is empty: give other sources"),
    ("a.txt", " \n", r"documents that can be used: 0, empty documents left out: 1"),
    ("a.json", '[\n  {"text": "one"}\n]\n', r"a\.json is indented JSON, .* `jq -c '\.\[\]'`"),
    ("a.txt", None, r"a\.txt cannot be read \(it is a pipe, "),
]


@pytest.mark.parametrize(("name", "content", "text"), WITHOUT_TEXT)
def test_a_file_without_text_is_called_what_it_is(tmp_path: Path, name: str, content: str | None, text: str) -> None:
    (folder := tmp_path / "in").mkdir()
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text(content)
    with pytest.raises(DataError, match=text):
        main(["tokenize", str(folder), "--out", str(tmp_path / "out"), "--workers", "1"])


def test_inspect_uses_the_task_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Call me \x1b[31mIshmael")
    assert data_command.main(["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert data_command.main(["inspect", str(tmp_path / "out"), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "tokens of bytes (vocabulary of 257)\ntrain: 21 tokens, 1 rows of 256\n" in shown
    assert r"Call me \x1b[31mIshmael<|endoftext|>" in shown
    assert data_command.main(["inspect", "--recipe", "digits"]) == 0
    assert "data.source=digits" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="lm_tiny is a recipe for the task causal_lm, and this command is for images"):
        data_command.main(["pack", "lm_tiny", "--to", "arrays", "--out", "no"])
    assert data_command.main(["inspect", "lm_tiny", "--row", "0", "data.sequence_length=20"]) == 0
    assert "=== row 0 of train: 21 tokens, 20 count as targets, documents: 1 ===\nETYMOLOGY." in capsys.readouterr().out
    with pytest.raises(DataError, match=r"--row 1: the split train has the rows 0\.\.0"):
        data_command.main(["inspect", str(tmp_path / "out"), "--row", "1"])
    with pytest.raises(DataError, match="has no split test; it has train"):
        data_command.main(["inspect", str(tmp_path / "out"), "--split", "test"])
