"""Texts as numbers: token folders, and the text that comes with the package.

A token folder is written once and mapped by all processes of a node:

    tokens.json       what was written: format, tokenizer, and of each split the numbers of tokens, documents and bytes
    tokenizer/        its files, copied
    token_bytes.bin   uint16 [vocabulary]: how many bytes of text each token stands for
    SPLIT.bin         the tokens of all documents one after another: uint16, or uint32 for more than 65,536 tokens
    SPLIT.documents   uint64 [D + 1]: where each document begins, and the end
    SPLIT.counted     only where not all tokens count (answers do, prompts do not): a bit for each token
    SPLIT.pieces, SPLIT.rows, SPLIT.counts    only for packed rows (`token_writer`): int64 [P, 2], int64 [R + 1], int32 [R]

Numbers are little-endian. The folder is written under a temporary name and renamed, so it is complete or does not exist.

Opening maps the files, compares their sizes, and a few blocks of each: it takes the same time for any size, and damage in
between goes unseen; `check` reads all. The fingerprint is made of the SHA-256 of each file, computed while it was written.

The bytes of a row are the sum of its tokens' bytes, by the table: exact for bytes and for byte-level BPE (GPT-2, Llama 3,
Qwen). Where a tokenizer changes the text, they are the bytes of the text that the tokens give back; tokens.json has both sums.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.data.data_files import reading
from app.errors import DataError
from app.files import text_files
from app.files.atomic_files import sha256_of
from app.files.text_files import parsed
from app.tasks.causal_lm.data.tokenizers import Bytes, Tokenizer, open_tokenizer

SPLITS = ("train", "validation", "test")
FORMAT = 1
"""Version of this layout, in tokens.json; other versions are refused."""
ABOUT, TOKENIZER, TOKEN_BYTES = "tokens.json", "tokenizer", "token_bytes.bin"
_BLOCKS, _BLOCK_BYTES = 16, 4096
_AGAIN = "write it again (samerun data tokenize), or correct data.path"
_MOBY_DICK = Path(__file__).with_name("moby_dick.txt.gz")


class Pieces(NamedTuple):
    """Parts of each packed row."""

    spans: np.ndarray
    """int64 [P, 2]: first token and length of each piece, in the order of the rows, and in a row in the order of the text."""
    rows: np.ndarray
    """int64 [R + 1]: row r has the pieces rows[r] .. rows[r + 1] - 1."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """One split as numbers."""

    where: str
    """The split and where it came from, as errors name it."""
    tokens: np.ndarray
    """Token ids of any unsigned type, [N]."""
    vocab_size: int
    fingerprint: str
    tokenizer: Mapping[str, Any]
    """Known facts about the tokenizer, as JSON holds them."""
    documents: np.ndarray
    """uint64 [D + 1], where each begins, and the end."""
    counted: np.ndarray | None = None
    """uint8 [ceil(N / 8)], a bit for each token that counts as a target, the lowest first; None: all do."""
    token_bytes: np.ndarray | None = None
    """uint16 [vocab_size]; None: not known."""
    packed: Pieces | None = None
    counts: np.ndarray | None = None
    """int32 [R]: targets in each packed row."""
    sequence_length: int | None = None
    """Length of packed rows."""


def about(folder: Path) -> dict[str, Any]:
    """Return the contents of tokens.json. Raises DataError unless this is a token folder of this format."""
    if not folder.exists():
        raise DataError(f"the token folder {folder} (data.path) does not exist: write it with `samerun data tokenize`, or "
                        "correct data.path")  # fmt: skip
    try:
        stored = parsed((folder / ABOUT).read_bytes())
        version = stored["format"]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a token folder: it has no {ABOUT}; {_AGAIN}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / ABOUT} cannot be read ({error}); {_AGAIN}") from None
    if version != FORMAT:
        raise DataError(f"{folder} has the format {version!r}, and this version reads {FORMAT}; {_AGAIN}")
    return dict(stored)


def open_split(folder: Path, split: str) -> Tokens | None:
    """Return a split of a token folder, mapped; None: it has no split of this name.

    Raises DataError if the folder is damaged, truncated, of another format or no token folder at all.
    """
    stored = about(folder)
    try:
        entry = stored["splits"].get(split)
        return None if entry is None else _opened(folder, split, stored, entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / ABOUT} is damaged ({type(error).__name__}: {error}); {_AGAIN}") from None


def check(folder: Path) -> None:
    """Read every file of a token folder. Raises DataError, naming the first that is not what was written."""
    stored = about(folder)
    files = dict(stored["files"])
    for entry in stored["splits"].values():
        files.update(entry["files"])
    for name, entry in files.items():
        _check_file(folder / name, entry)
        if sha256_of(folder / name) != entry["sha256"]:
            raise DataError(f"{folder / name} has changed since it was written (its SHA-256 differs); {_AGAIN}")


def _opened(folder: Path, split: str, stored: Mapping[str, Any], entry: Mapping[str, Any]) -> Tokens:
    files = {**stored["files"], **entry["files"]}
    for name, written in files.items():
        _check_file(folder / name, written)

    def mapped(name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        expected = math.prod(shape) * np.dtype(kind).itemsize
        if files[name]["bytes"] != expected:
            raise ValueError(f"{name} should have {expected} bytes and has {files[name]['bytes']}")
        # A plain view: NumPy's memmap runs Python code at each look-up.
        return np.asarray(np.memmap(folder / name, kind, mode="r", shape=shape)) if expected else np.empty(shape, kind)

    tokens, tokenizer = int(entry["tokens"]), stored["tokenizer"]
    vocabulary = int(tokenizer["vocab_size"])
    packed = counts = None
    if stored["packed"]:
        rows = int(entry["rows"])
        packed = Pieces(
            mapped(f"{split}.pieces", "<i8", (int(entry["pieces"]), 2)), mapped(f"{split}.rows", "<i8", (rows + 1,))
        )
        counts = mapped(f"{split}.counts", "<i4", (rows,))
    digests = {name: file["sha256"] for name, file in sorted(entry["files"].items())}
    made_of = [stored["format"], stored["dtype"], stored["sequence_length"], tokenizer["digest"], digests]
    return Tokens(
        where=f"the split {split} of {folder}",
        tokens=mapped(f"{split}.bin", {"uint16": "<u2", "uint32": "<u4"}[stored["dtype"]], (tokens,)),
        vocab_size=vocabulary,
        fingerprint=hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32],
        tokenizer={key: value for key, value in tokenizer.items() if key != "files"},
        documents=mapped(f"{split}.documents", "<u8", (int(entry["documents"]) + 1,)),
        counted=mapped(f"{split}.counted", "u1", (-(-tokens // 8),)) if stored["answers"] else None,
        token_bytes=mapped(TOKEN_BYTES, "<u2", (vocabulary,)) if TOKEN_BYTES in files else None,
        packed=packed,
        counts=counts,
        sequence_length=stored["sequence_length"],
    )


def _check_file(path: Path, written: Mapping[str, Any]) -> None:
    with reading(path, _AGAIN):
        size = path.stat().st_size
        if size != written["bytes"]:
            raise DataError(
                f"{path} has {size} bytes instead of {written['bytes']}: it is truncated, or another file; {_AGAIN}"
            )
        blocks = blocks_digest(path)
    if blocks != written["blocks"]:
        raise DataError(f"{path} has changed since it was written; {_AGAIN}")


def blocks_digest(path: Path) -> str:
    """Return a hash of blocks of a file, evenly over it, with the first and the last. Raises OSError."""
    size = path.stat().st_size
    last = max(0, size - _BLOCK_BYTES)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for offset in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def embedded_documents() -> dict[str, list[bytes]]:
    """Return the chapters of each split of Moby Dick, in their order, as UTF-8 (moby_dick.md lists the splits)."""
    splits: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for number, chapter in enumerate(gzip.decompress(_MOBY_DICK.read_bytes()).split(b"\f")):
        splits[{9: "validation", 19: "test"}.get(number % 20, "train")].append(chapter)
    return splits


def open_embedded(split: str) -> Tokens:
    """Return a split of Moby Dick as bytes: train, validation or test. Nothing is downloaded or written."""
    tokenizer, chapters = Bytes(), embedded_documents()[split]
    tokens = np.concatenate([tokenizer.document(chapter) for chapter in chapters])
    ends = np.cumsum([len(chapter) + 1 for chapter in chapters])
    return Tokens(
        where=f"the split {split} of the embedded text",
        tokens=tokens,
        vocab_size=tokenizer.about["vocab_size"],
        fingerprint=hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:32],
        tokenizer=tokenizer.about,
        documents=np.concatenate([[0], ends]).astype(np.uint64),
        token_bytes=tokenizer.token_bytes,
    )


def stored_tokenizer(data_path: str | None) -> Tokenizer | None:
    """Return the tokenizer of the text at data.path; None: it is not stored with the text."""
    if data_path is None:
        return Bytes()
    folder = Path(text_files.filled_in("data.path", data_path))
    tokenizer = about(folder)["tokenizer"]
    if tokenizer["kind"] == "bytes":
        return Bytes()
    return open_tokenizer(str(folder / TOKENIZER)) if tokenizer["files"] else None
