"""Token folders: written whole or not at all, opened in constant time, refused when they are not what was written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DataError
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.store import about, blocks_digest, check, is_nanogpt, open_nanogpt, open_split
from app.tasks.causal_lm.data.token_writer import best_fit, writing
from app.tasks.causal_lm.sections import DataRecipe, ModelRecipe, Sections
from app.tasks.causal_lm.task import CausalLM

ABOUT = {"kind": "test", "vocab_size": 300, "digest": "one"}
LENGTHS = np.random.default_rng(0).integers(1, 90, 400)
TOKENS = np.random.default_rng(1).integers(0, 300, LENGTHS.sum())


def write(
    folder: Path, *, blocks: int = 1, packed: int | None = None, tokens: np.ndarray = TOKENS, digest: str = "one"
) -> Path:
    """A folder of 400 documents, which come in so many blocks; every seventh token counts."""
    tokenizer = {**ABOUT, "digest": digest}
    files = {"tokenizer.json": b"{}"}
    with writing(folder, tokenizer, files, token_bytes=np.ones(300), sequence_length=packed, answers=True) as writer:
        start = 0
        for lengths in np.array_split(LENGTHS, blocks):
            own = tokens[start : start + lengths.sum()]
            counted = np.arange(start, start + len(own)) % 7 == 0
            writer.append("train", own, lengths, counted=counted, text_bytes=len(own))
            start += len(own)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("packed", [None, 64])
def test_the_same_documents_give_the_same_files_however_they_come(tmp_path: Path, packed: int | None) -> None:
    first = content(write(tmp_path / "1", packed=packed))
    for blocks in (3, 400):
        assert content(write(tmp_path / str(blocks), blocks=blocks, packed=packed)) == first
    check(tmp_path / "3")
    said = about(tmp_path / "1")["splits"]["train"]
    assert (said["tokens"], said["documents"], said["bytes"]) == (len(TOKENS), 400, len(TOKENS))


def test_other_text_or_tokenizer_is_other_data(tmp_path: Path) -> None:
    other = TOKENS.copy()
    other[12_345] ^= 1  # in none of the blocks that are looked at
    folders = [
        write(tmp_path / "a"),
        write(tmp_path / "b", tokens=other),
        write(tmp_path / "c", digest="two"),
        write(tmp_path / "d", packed=64),
    ]
    prints = [split.fingerprint for folder in folders if (split := open_split(folder, "train"))]
    assert len(set(prints)) == 4
    moved = shutil.copytree(folders[0], tmp_path / "moved")
    assert open_split(moved, "train").fingerprint == prints[0]  # type: ignore[union-attr]
    assert open_split(moved, "validation") is None


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def half() -> None:
        with writing(tmp_path / "out", ABOUT, {}, token_bytes=None) as writer:
            writer.append("train", TOKENS, LENGTHS)
            writer.append("train", np.array([300]), np.array([1]))

    with pytest.raises(DataError, match=r"tokens in 300\.\.300, .* vocabulary has 300"):
        half()
    with pytest.raises(DataError, match="no tokens"), writing(tmp_path / "out", ABOUT, {}, token_bytes=None):
        pass
    assert not list(tmp_path.iterdir())
    write(tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match="cannot be written: File exists"):
        write(tmp_path / "out")
    assert content(tmp_path / "out") == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def other_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x2a")


def future(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))


def thinned(path: Path) -> None:
    said = json.loads(path.read_text())
    del said["splits"]["train"]["files"]["train.bin"]
    path.write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("train.bin", cut, r"train\.bin has \d+ bytes instead of \d+"),
        ("train.bin", other_end, r"train\.bin has changed"),
        ("train.pieces", Path.unlink, r"train\.pieces cannot be read"),
        ("tokenizer/tokenizer.json", other_end, r"tokenizer\.json has changed"),
        ("tokens.json", Path.unlink, "is not a token folder"),
        ("tokens.json", cut, r"tokens\.json cannot be read"),
        ("tokens.json", future, r"has the format 9, and this version reads 1"),
        ("tokens.json", thinned, r"is damaged"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, name: str, damage: Callable[[Path], None], says: str) -> None:
    folder = write(tmp_path / "out", packed=64)
    damage(folder / name)
    with pytest.raises(DataError, match=says) as raised:
        open_split(folder, "train")
    assert "\n" not in str(raised.value)


def test_a_change_between_the_blocks_is_found_by_reading_all(tmp_path: Path) -> None:
    folder = write(tmp_path / "out")
    long = np.tile(TOKENS, 20)
    with writing(tmp_path / "long", ABOUT, {}, token_bytes=None) as writer:
        writer.append("train", long, np.array([len(long)]))
    check(folder)
    content = bytearray((tmp_path / "long" / "train.bin").read_bytes())
    content[5000] ^= 1
    (tmp_path / "long" / "train.bin").write_bytes(content)
    open_split(tmp_path / "long", "train")
    with pytest.raises(DataError, match=r"train\.bin has changed since it was written \(its SHA-256"):
        check(tmp_path / "long")


_FIRST_BATCH = """
import resource, sys, numpy as np
from pathlib import Path
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.store import open_split
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_utime + resource.getrusage(resource.RUSAGE_SELF).ru_stime
held = anonymous()
rows = Rows(open_split(Path(sys.argv[1]), "train"), 1024, training=True)
rows.fetch(np.linspace(0, len(rows) - 1, 64).astype(np.int64), None)
rows.count(np.arange(64))
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_utime + used.ru_stime - before, anonymous() - held, len(rows))
"""


def sparse(folder: Path, tokens: int) -> Path:
    """A folder of so many tokens, all 0, which takes no room on the disk: only its sizes and blocks are as they are said."""
    with writing(folder, ABOUT, {}, token_bytes=np.ones(300)) as writer:
        writer.append("train", np.zeros(8, int), np.array([8]))
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(tokens * 2)
    np.array([0, tokens], "<u8").tofile(folder / "train.documents")
    said = about(folder)
    entry = said["splits"]["train"]
    entry["tokens"] = tokens
    for name in ("train.bin", "train.documents"):
        path = folder / name
        entry["files"][name] = {"bytes": path.stat().st_size, "sha256": "unknown", "blocks": blocks_digest(path)}
    (folder / "tokens.json").write_text(json.dumps(said))
    return folder


def test_two_billion_tokens_open_as_two_million_do(tmp_path: Path) -> None:
    """CPU time from the opening to a first batch, and the memory it took, of a file of 4 GB; imports are not counted."""
    figures = []
    for tokens in (2_000_000, 2_000_000_000):
        folder = sparse(tmp_path / str(tokens), tokens)
        command = [sys.executable, "-c", _FIRST_BATCH, str(folder)]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        figures.append([float(word) for word in finished.stdout.split()])
        print(tokens, finished.stdout)
    (_, small_s, small_kib, _), (_, large_s, large_kib, rows) = figures
    assert rows == (2_000_000_000 - 1) // 1024
    assert large_s < small_s + 0.5
    assert large_kib < small_kib + 4096


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 30), max_size=60), capacity=st.integers(30, 40))
def test_packing_is_best_fit_one_by_one(lengths: list[int], capacity: int) -> None:
    """Against the textbook's loop: the longest first, each where it leaves least; as many rows, equally full."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in range(len(rows)) if rows[row] >= length]
        if fits:
            rows[min(fits, key=lambda row: rows[row])] -= length
        else:
            rows.append(capacity - length)
    row_of = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(row_of, weights=lengths) if lengths else np.empty(0)
    assert sorted(capacity - filled) == sorted(rows)


def test_nanogpt_files_are_read_as_nanogpt_reads_them(tmp_path: Path) -> None:
    stream = np.random.default_rng(2).integers(0, 500, 10_001).astype(np.uint16)
    stream.tofile(tmp_path / "train.bin")
    (stream[:50] + 400).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"is not opened")
    assert is_nanogpt(tmp_path)
    split = open_nanogpt(tmp_path, "train")
    assert split is not None
    assert split.vocab_size == 1 + max(stream.max(), (stream[:50] + 400).max())
    rows = Rows(split, 64)
    batch = rows.fetch(np.arange(len(rows)), None)
    # nanoGPT's train.py, get_batch: a map of uint16, and at an offset i these two
    data = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    for row in range(len(rows) - 1):
        i = row * 64
        assert batch["tokens"][row, :-1].tolist() == data[i : i + 64].tolist()
        assert batch["tokens"][row, 1:].tolist() == data[i + 1 : i + 1 + 64].tolist()
    assert "bytes" not in batch
    assert open_nanogpt(tmp_path, "test") is None
    recipe = Sections(data=DataRecipe(path=str(tmp_path), sequence_length=64), model=ModelRecipe(vocab_size=50304))
    held_out = CausalLM(recipe).samples("validation")
    assert held_out is not None
    assert (held_out.facts["vocab_size"], len(held_out)) == (50304, 1)

    with pytest.raises(DataError, match="document_masks"):
        Rows(split, 64, document_masks=True)
    with (tmp_path / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="20003 bytes"):
        open_nanogpt(tmp_path, "train")
    np.array([20240520, 1, 5], np.int32).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"header of llm\.c"):
        open_nanogpt(tmp_path, "train")
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(DataError, match=r"set model\.vocab_size"):
        open_nanogpt(tmp_path, "train")
