"""Token folders: written whole or not at all, opened in constant time, refused when they are not what was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DataError
from app.tasks.causal_lm.data.store import about, check, open_split
from app.tasks.causal_lm.data.token_writer import best_fit, writing

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
    assert content(write(tmp_path / "3", blocks=3, packed=packed)) == first
    check(tmp_path / "3")
    said = about(tmp_path / "1")["splits"]["train"]
    assert (said["tokens"], said["documents"], said["bytes"]) == (len(TOKENS), 400, len(TOKENS))


def test_other_text_or_tokenizer_is_other_data(tmp_path: Path) -> None:
    other = TOKENS.copy()
    other[12_345] ^= 1  # in none of the blocks that are looked at
    first = write(tmp_path / "a")
    others = [write(tmp_path / "b", tokens=other), write(tmp_path / "c", digest="two"), write(tmp_path / "d", packed=64)]
    prints = [split.fingerprint for folder in (first, *others) if (split := open_split(folder, "train"))]
    assert len(set(prints)) == 4
    moved = shutil.copytree(first, tmp_path / "moved")
    assert open_split(moved, "train").fingerprint == prints[0]  # type: ignore[union-attr]
    assert open_split(moved, "validation") is None


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokens in 0\.\.300, .* vocabulary has 300"):
        write(tmp_path / "out", tokens=np.where(np.arange(len(TOKENS)) == 9_999, 300, TOKENS))
    assert not list(tmp_path.iterdir())
    before = content(write(tmp_path / "out"))
    with pytest.raises(DataError, match="already exists"):
        write(tmp_path / "out")
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("train.bin", lambda content: content[:-2], r"train\.bin has \d+ bytes instead of \d+"),
        ("train.bin", lambda content: content[:-1] + b"*", r"train\.bin has changed"),
        ("train.pieces", None, r"train\.pieces cannot be read"),
        ("tokens.json", None, "is not a token folder"),
        ("tokens.json", lambda content: content[:-2], r"tokens\.json cannot be read"),
        ("tokens.json", lambda content: content.replace(b'"format": 1', b'"format": 9'), r"has the format 9, and this version"),
        ("tokens.json", lambda content: content.replace(b'"splits"', b'"parts"'), r"is damaged"),
        (".", None, r"\(data\.path\) does not exist: write it with `samerun data tokenize`"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, says: str) -> None:
    folder = write(tmp_path / "out", packed=64)
    path = folder / name
    if damage is not None:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=says) as raised:
        open_split(folder, "train")
    assert "\n" not in str(raised.value)


def test_a_change_between_the_blocks_is_found_by_reading_all(tmp_path: Path) -> None:
    with writing(tmp_path / "long", ABOUT, {}, token_bytes=None) as writer:
        writer.append("train", np.tile(TOKENS, 20), np.array([20 * len(TOKENS)]))
    check(tmp_path / "long")
    content = bytearray((tmp_path / "long" / "train.bin").read_bytes())
    content[5000] ^= 1
    (tmp_path / "long" / "train.bin").write_bytes(content)
    open_split(tmp_path / "long", "train")
    with pytest.raises(DataError, match=r"train\.bin has changed since it was written \(its SHA-256"):
        check(tmp_path / "long")


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
