"""Token folders: texts as numbers on disk, written once, mapped by all processes of a node.

    tokens.json       what was written: format, tokenizer, and of each split the numbers of tokens, documents and bytes
    tokenizer/        its files, copied
    token_bytes.bin   uint16 [vocabulary]: how many bytes of text each token stands for
    SPLIT.bin         the tokens of all documents one after another: uint16, or uint32 for more than 65,536 tokens
    SPLIT.documents   uint64 [D + 1]: where each document begins, and the end
    SPLIT.counted     only where not all tokens count (answers do, prompts do not): a bit for each token
    SPLIT.pieces, SPLIT.rows, SPLIT.counts    only for packed rows (`packing`): int64 [P, 2], int64 [R + 1], int32 [R]

Numbers are little-endian. The folder is written under a temporary name and renamed: what has its name is whole.

Opening maps the files, compares their sizes, and a few blocks of each: it takes the same for any size, and damage in between
goes unseen; `check` reads all. The fingerprint is made of the SHA-256 of each file, computed while it was written.

The bytes of a row are the sum of those of its tokens, by the table: exact for bytes and for byte-level BPE (GPT-2, Llama 3,
Qwen). Where a tokenizer changes the text, they are the bytes of the text that the tokens give back; tokens.json has both sums.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.files.whole import sha256_of
from app.tasks.causal_lm.data.packing import Pieces

FORMAT = 1
"""Version of this layout, in tokens.json; other versions are refused."""
ABOUT, TOKENIZER, TOKEN_BYTES = "tokens.json", "tokenizer", "token_bytes.bin"
_BLOCKS, _BLOCK_BYTES = 16, 4096
_AGAIN = "write it again (samerun data tokenize), or correct data.path"


@dataclass(frozen=True, eq=False)
class Tokens:
    """One split as numbers; pickled, one in a folder is the folder's name."""

    where: str
    """The split and where it came from, as errors name it."""
    tokens: np.ndarray
    """Of any unsigned type, [N]."""
    vocab_size: int
    fingerprint: str
    tokenizer: Mapping[str, Any]
    """What is known of it, as JSON holds it."""
    documents: np.ndarray | None = None
    """uint64 [D + 1], where each begins, and the end; None: not known."""
    counted: np.ndarray | None = None
    """uint8 [ceil(N / 8)], a bit for each token that counts as a target, the lowest first; None: all do."""
    token_bytes: np.ndarray | None = None
    """uint16 [vocab_size]; None: not known."""
    packed: Pieces | None = None
    counts: np.ndarray | None = None
    """int32 [R]: targets in each packed row."""
    sequence_length: int | None = None
    """That of packed rows."""
    again: tuple[Callable[..., Tokens | None], tuple[Any, ...]] | None = None
    """Opens the split in another process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.again or (Tokens, tuple(self.__dict__.values()))


def about(folder: Path) -> dict[str, Any]:
    """Return what tokens.json says. Raises DataError unless this is a token folder of this format."""
    try:
        said = json.loads((folder / ABOUT).read_text())
        version = said["format"]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a token folder: it has no {ABOUT}; {_AGAIN}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / ABOUT} cannot be read ({error}); {_AGAIN}") from None
    if version != FORMAT:
        raise DataError(f"{folder} has the format {version!r}, and this version reads {FORMAT}; {_AGAIN}")
    return dict(said)


def open_split(folder: Path, split: str) -> Tokens | None:
    """Return a split of a token folder, mapped; None: it has none of this name.

    Raises DataError if the folder is damaged, cut, of another format or no token folder at all.
    """
    said = about(folder)
    try:
        entry = said["splits"].get(split)
        return None if entry is None else _opened(folder, split, said, entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / ABOUT} is damaged ({type(error).__name__}: {error}); {_AGAIN}") from None


def check(folder: Path) -> None:
    """Read every file of a token folder. Raises DataError, naming the first that is not what was written."""
    said = about(folder)
    files = dict(said["files"])
    for entry in said["splits"].values():
        files.update(entry["files"])
    for name, entry in files.items():
        _check_file(folder / name, entry)
        if sha256_of(folder / name) != entry["sha256"]:
            raise DataError(f"{folder / name} has changed since it was written (its SHA-256 differs); {_AGAIN}")


def _opened(folder: Path, split: str, said: Mapping[str, Any], entry: Mapping[str, Any]) -> Tokens:
    files = {**said["files"], **entry["files"]}
    for name, written in files.items():
        _check_file(folder / name, written)

    def mapped(name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        expected = math.prod(shape) * np.dtype(kind).itemsize
        if files[name]["bytes"] != expected:
            raise ValueError(f"{name} should have {expected} bytes and has {files[name]['bytes']}")
        # A plain view: NumPy's memmap runs Python code at each look-up.
        return np.asarray(np.memmap(folder / name, kind, mode="r", shape=shape)) if expected else np.empty(shape, kind)

    tokens, tokenizer = int(entry["tokens"]), said["tokenizer"]
    vocabulary = int(tokenizer["vocab_size"])
    packed = counts = None
    if said["packed"]:
        rows = int(entry["rows"])
        packed = Pieces(
            mapped(f"{split}.pieces", "<i8", (int(entry["pieces"]), 2)), mapped(f"{split}.rows", "<i8", (rows + 1,))
        )
        counts = mapped(f"{split}.counts", "<i4", (rows,))
    return Tokens(
        where=f"the split {split} of {folder}",
        tokens=mapped(f"{split}.bin", {"uint16": "<u2", "uint32": "<u4"}[said["dtype"]], (tokens,)),
        vocab_size=vocabulary,
        fingerprint=fingerprint_of(said, entry),
        tokenizer={key: value for key, value in tokenizer.items() if key != "files"},
        documents=mapped(f"{split}.documents", "<u8", (int(entry["documents"]) + 1,)),
        counted=mapped(f"{split}.counted", "u1", (-(-tokens // 8),)) if said["answers"] else None,
        token_bytes=mapped(TOKEN_BYTES, "<u2", (vocabulary,)) if TOKEN_BYTES in files else None,
        packed=packed,
        counts=counts,
        sequence_length=said["sequence_length"],
        again=(open_split, (folder, split)),
    )


def fingerprint_of(said: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return what tells a split from any other: of the digests of its files, and of the tokenizer."""
    digests = {name: file["sha256"] for name, file in sorted(entry["files"].items())}
    made_of = [said["format"], said["dtype"], said["sequence_length"], said["tokenizer"]["digest"], digests]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


def _check_file(path: Path, written: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != written["bytes"]:
            raise DataError(
                f"{path} has {size} bytes instead of {written['bytes']}: it is truncated, or another file; {_AGAIN}"
            )
        seen = blocks_digest(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {_AGAIN}") from None
    if seen != written["blocks"]:
        raise DataError(f"{path} has changed since it was written; {_AGAIN}")


def blocks_digest(path: Path, blocks: int = _BLOCKS) -> str:
    """Return a hash of blocks of a file, evenly over it, with the first and the last. Raises OSError."""
    size = path.stat().st_size
    last = max(0, size - _BLOCK_BYTES)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for offset in sorted({last * block // (blocks - 1) for block in range(blocks)}):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]
