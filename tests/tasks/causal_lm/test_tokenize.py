"""`samerun data tokenize`: the same folder from any number of processes, after any kill; and the door of `samerun data`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from processes import REPOSITORY
from small_tokenizer import chapters, write_tokenizer

from app.errors import DataError, RecipeError, UsageError
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.command import main
from app.tasks.causal_lm.data.tokenizers import open_tokenizer
from app.tasks.causal_lm.data.tokenizing import parts_folder
from app.tools import data_command

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
    told = ["--document-separator", "<|>", "--validation", "0.05", "--test", "0.02", "--tokenizer", bpe, *packing]
    numbers = ("1", "3") if packing else ("1", "2", "3")
    for workers in numbers:
        assert main(["tokenize", str(book), *told, "--out", str(tmp_path / workers), "--workers", workers]) == 0
    first = files_in(tmp_path / "1")
    assert all(files_in(tmp_path / workers) == first for workers in numbers)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(numbers)
    about = store.about(tmp_path / "1")
    documents = {split: said["documents"] for split, said in about["splits"].items()}
    total = sum(documents.values())
    assert 0.03 * total < documents["validation"] < 0.07 * total
    assert 0.01 * total < documents["test"] < 0.035 * total
    source = [json.loads(line)["text"] for line in (book / "a.jsonl").read_text().splitlines()] + (
        book / "b.txt"
    ).read_text().split("<|>")
    source = [text for text in source if text.strip()]
    split_texts = {split: iter(texts_of(tmp_path / "1", split, bpe)) for split in documents}
    ahead = {split: next(found) for split, found in split_texts.items()}
    for text in source:  # each is the next of one of the splits
        (split, *_) = [split for split, there in ahead.items() if there == text]
        ahead[split] = next(split_texts[split], "")
    assert not any(ahead.values())
    assert sum(said["bytes"] for said in about["splits"].values()) == sum(len(text.encode()) for text in source)
    said = capsys.readouterr().out
    assert f"{documents['train']:,}" in said
    assert "x empty document" in said
    assert ("rows" in said) == bool(packing)


def test_a_killed_command_goes_on_from_its_parts(book: Path, bpe: str, tmp_path: Path) -> None:
    told = ["tokenize", str(book), "--document-separator", "<|>", "--tokenizer", bpe, "--workers", "2"]
    assert main([*told, "--out", str(tmp_path / "whole")]) == 0
    out, parts = tmp_path / "out", tmp_path / ".out.parts"
    command = [sys.executable, "-m", "launch.cli", "data", *told, "--out", str(out)]
    whole = "[!.]*/about.json"  # a part is renamed when it is whole: until then its name begins with a dot
    running = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    while not list(parts.glob(whole)):
        assert running.poll() is None
        time.sleep(0.002)
    started = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not psutil.wait_procs(started, timeout=20)[1], "what it had started goes with it"
    assert not out.exists()
    done = {path: path.stat().st_mtime_ns for path in parts.glob(whole)}
    assert done
    damaged = next(iter(done)).parent / "tokens" if len(done) > 1 else None
    if damaged is not None:
        damaged.write_bytes(bytes([*(it ^ 1 for it in damaged.read_bytes())]))
    again = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    kept = len(done) - (damaged is not None)
    assert f"; {kept} of " in again.stdout, again.stdout
    assert files_in(out) == files_in(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_parts_of_what_is_mended_are_kept(book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n\n{"text": 3}\n{"text": null}\n')
    told = ["tokenize", str(book / "a.jsonl"), str(bad), "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(
        DataError, match=r"bad\.jsonl, line 3: column 'text' holds int, not text\. Correct it, or skip such rows"
    ):
        main(told)
    assert not (tmp_path / "out").exists()
    bad.write_text('{"text": "good"}\n\n{"text": "three"}\n{"text": null}\n')
    assert main(told) == 0
    assert texts_of(tmp_path / "out", "train", "bytes")[-2:] == ["good", "three"]
    assert "3 of 4 parts were already done" in capsys.readouterr().out
    bad.write_bytes(b'{"text": "good"}\n{"text": "\\ud800"}\n{\n{"text": "last"}')
    for workers in ("1", "2"):
        out = str(tmp_path / f"skipped{workers}")
        assert main(["tokenize", str(bad), "--skip-unreadable", "--out", out, "--workers", workers]) == 0
        assert texts_of(Path(out), "train", "bytes") == ["good", "last"]
        assert "left out: 2 x unreadable row" in capsys.readouterr().out


def test_splits_may_have_sources_of_their_own(tmp_path: Path) -> None:
    for name in ("train", "held", "last"):
        (tmp_path / f"{name}.txt").write_text(f"{name} \N{WHALE}")
    told = ["--validation-source", str(tmp_path / "held.txt"), "--test-source", str(tmp_path / "last.txt")]
    assert main(["tokenize", str(tmp_path / "train.txt"), *told, "--out", str(tmp_path / "out")]) == 0
    found = [texts_of(tmp_path / "out", split, "bytes") for split in ("train", "validation", "test")]
    assert found == [["train \N{WHALE}"], ["held \N{WHALE}"], ["last \N{WHALE}"]]


REFUSED = [
    (
        ["--validation", "0.01", "--validation-source", "b"],
        UsageError,
        "--validation uses training documents, and --validation-source",
    ),
    (["--validation", "0.5", "--test", "0.5"], UsageError, "use all training documents"),
    (["--sequence-length", "9"], UsageError, "--sequence-length is for packed rows"),
    (["--column", "a,b"], UsageError, "--column a,b: expected one name"),
    (["--too-long", "leave-out"], UsageError, "--too-long is for --prompts"),
    (["--prompts"], DataError, "the first row has the columns 'text', neither prompt and completion nor messages"),
    (["--prompts", "--column", "text,more"], DataError, "no column 'more'"),
    (
        ["--validation", "0.01"],
        DataError,
        r"the split validation would be empty: there are 2 documents in total \(shares: 0.01",
    ),
    (["--config", "en"], UsageError, "--config en: it is for data sets of the hub, and all sources are files"),
    (["--validation-split", "held"], UsageError, "--validation-split held: it is for data sets with splits"),
    (["--column", "words"], DataError, r"a\.jsonl, line 1: no column 'words'; there are 'text'"),
]


@pytest.mark.parametrize(("told", "error", "text"), REFUSED)
def test_what_cannot_be_made_is_said(tmp_path: Path, told: list[str], error: type[Exception], text: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    command = ["tokenize", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(error, match=text):
        main([*command, *told])
    assert not (tmp_path / "out").exists()


def test_nothing_is_replaced_and_two_do_not_write_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    command = ["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    with parts_folder(tmp_path / "out"), pytest.raises(DataError, match="out is being written by another process"):
        main(command)
    assert main(command) == 0
    with pytest.raises(DataError, match="out already exists, and no files are replaced"):
        main(command)


def test_inspect_goes_to_the_task_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Call me \x1b[31mIshmael")
    assert data_command.main(["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert data_command.main(["inspect", str(tmp_path / "out"), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "tokens of bytes (vocabulary of 257)" in shown
    assert r"Call me \x1b[31mIshmael<|endoftext|>" in shown
    assert data_command.main(["inspect", "--recipe", "digits"]) == 0
    assert "data.source=digits" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="lm_tiny is a recipe for the task causal_lm, and this command is for pictures"):
        data_command.main(["pack", "lm_tiny", "--to", "arrays", "--out", "no"])
    assert data_command.main(["inspect", "lm_tiny", "--rows", "1", "data.sequence_length=20"]) == 0
    assert "=== row 0 of train: 21 tokens, 20 count as targets, 1 document ===\nETYMOLOGY." in capsys.readouterr().out
    with pytest.raises(DataError, match=r"--row 1: the split train has the rows 0\.\.0"):
        data_command.main(["inspect", str(tmp_path / "out"), "--row", "1"])
    with pytest.raises(DataError, match="has no split test; it has train"):
        data_command.main(["inspect", str(tmp_path / "out"), "--split", "test"])
