"""Texts as numbers: token folders, nanoGPT's files, and the text that comes with the package.

A token folder is written once and mapped by all processes of a node:

    tokens.json       what was written: format, tokenizer, and of each split the numbers of tokens, documents and bytes
    tokenizer/        its files, copied
    token_bytes.bin   uint16 [vocabulary]: how many bytes of text each token stands for
    SPLIT.bin         the tokens of all documents one after another: uint16, or uint32 for more than 65,536 tokens
    SPLIT.documents   uint64 [D + 1]: where each document begins, and the end
    SPLIT.counted     only where not all tokens count (answers do, prompts do not): a bit for each token
    SPLIT.pieces, SPLIT.rows, SPLIT.counts    only for packed rows (`packing`): int64 [P, 2], int64 [R + 1], int32 [R]

Numbers are little-endian. The folder is written under a temporary name and renamed, so it is complete or does not exist.

Opening maps the files, compares their sizes, and a few blocks of each: it takes the same time for any size, and damage in
between goes unseen; `check` reads all. The fingerprint is made of the SHA-256 of each file, computed while it was written.

The bytes of a row are the sum of those of its tokens, by the table: exact for bytes and for byte-level BPE (GPT-2, Llama 3,
Qwen). Where a tokenizer changes the text, they are the bytes of the text that the tokens give back; tokens.json has both sums.

nanoGPT's train.bin and val.bin (its data/*/prepare.py) are numbers of 16 bits without a header, read in place. They do not
record where documents begin, nor how many bytes of text a token stands for: there are no document masks, and no bits per byte.
meta.pkl is not opened, because a pickle may run code: the vocabulary is that of the model, where the recipe gives it
(`model.vocab_size`, or the config.json of `model.path`), or else ends at the largest token of both files. The fingerprint is
made of the size and of 256 blocks of each file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.errors import DataError
from app.files.atomic_files import sha256_of
from app.files.lines import parsed
from app.tasks.causal_lm.data.tokenizers import Bytes

SPLITS = ("train", "validation", "test")
FORMAT = 1
"""Version of this layout, in tokens.json; other versions are refused."""
ABOUT, TOKENIZER, TOKEN_BYTES = "tokens.json", "tokenizer", "token_bytes.bin"
_BLOCKS, _BLOCK_BYTES = 16, 4096
_AGAIN = "write it again (samerun data tokenize), or correct data.path"
_NANOGPT = {"train": "train.bin", "validation": "val.bin"}
_NANOGPT_BLOCKS, _NANOGPT_MOST_BYTES = 256, 1 << 30
"""In larger files the largest token is not searched for: every process would have to read the whole file."""
_LLM_C = (20240520, 20240801)
"""The first number of llm.c's files, which have a header."""
_MOBY_DICK = Path(__file__).with_name("moby_dick.txt.gz")


class Pieces(NamedTuple):
    """What each packed row is made of."""

    spans: np.ndarray
    """int64 [P, 2]: first token and length of each piece, in the order of the rows, and in a row in the order of the text."""
    rows: np.ndarray
    """int64 [R + 1]: row r has the pieces rows[r] .. rows[r + 1] - 1."""


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
    if not folder.exists():
        raise DataError(f"the token folder {folder} (data.path) does not exist: write it with `samerun data tokenize`, or "
                        "correct data.path")  # fmt: skip
    try:
        said = parsed((folder / ABOUT).read_bytes())
        version = said["format"]
    except FileNotFoundError:
        raise DataError(f"{folder} is not a token folder: it has no {ABOUT}; {_AGAIN}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / ABOUT} cannot be read ({error}); {_AGAIN}") from None
    if version != FORMAT:
        raise DataError(f"{folder} has the format {version!r}, and this version reads {FORMAT}; {_AGAIN}")
    return dict(said)


def open_split(folder: Path, split: str) -> Tokens | None:
    """Return a split of a token folder, mapped; None: it has no split of this name.

    Raises DataError if the folder is damaged, truncated, of another format or no token folder at all.
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


def is_nanogpt(folder: Path) -> bool:
    """Return whether a folder has nanoGPT's files, and is no token folder."""
    return (folder / _NANOGPT["train"]).is_file() and not (folder / ABOUT).exists()


def open_nanogpt(folder: Path, split: str, vocab_size: int | None = None) -> Tokens | None:
    """Return a split of a nanoGPT folder, mapped; None: it has no split of this name, such as test.

    Without `vocab_size` the vocabulary ends at the largest token in the files. Raises DataError if a file is truncated, empty
    or of another kind, or too large to search for its largest token.
    """
    path = folder / _NANOGPT.get(split, "")
    if split not in _NANOGPT or not path.is_file():
        return None
    tokens = _nanogpt_tokens(path)
    origin = "up to the largest token" if vocab_size is None else "that of the model"
    size = vocab_size or 1 + max(_largest(folder / name) for name in _NANOGPT.values() if (folder / name).is_file())
    tokenizer: dict[str, Any] = {
        "kind": "unknown",
        "name": f"unknown (nanoGPT's files do not record it; vocabulary: {origin})",
        "revision": None,
        "digest": None,
        "vocab_size": size,
        "eos_id": None,
        "bos_id": None,
    }
    return Tokens(
        where=str(path),
        tokens=tokens,
        vocab_size=size,
        fingerprint=blocks_digest(path, _NANOGPT_BLOCKS),
        tokenizer=tokenizer,
        again=(open_nanogpt, (folder, split, size)),
    )


def _nanogpt_tokens(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(4)
        if size % 2 or size < 4:
            raise DataError(
                f"{path} has {size} bytes, not a whole number of 16-bit tokens: it is truncated, or not a file of nanoGPT"
            )
        if struct.unpack("<i", begin)[0] in _LLM_C:
            raise DataError(
                f"{path} has the header of llm.c, and nanoGPT's files have none: tokenize the texts (samerun data tokenize)"
            )
        return np.asarray(np.memmap(path, "<u2", mode="r"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); correct data.path") from None


def _largest(path: Path) -> int:
    tokens, step = _nanogpt_tokens(path), 1 << 24
    if tokens.nbytes > _NANOGPT_MOST_BYTES:
        raise DataError(
            f"{path} does not record the size of its vocabulary, and is too large to search for the largest "
            "token at each start: set model.vocab_size (50257 for GPT-2)"
        )
    return max(int(tokens[at : at + step].max()) for at in range(0, len(tokens), step))


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
        again=(open_embedded, (split,)),
    )


def table(said: Mapping[str, Any]) -> list[str]:
    """Return what tokens.json records of each split, as the lines of a table."""
    rows = [["", "documents", "tokens", "bytes", "bytes per token", *(["rows"] if said["packed"] else [])]]
    for split in SPLITS:
        if entry := said["splits"].get(split):
            numbers = [f"{entry[name]:,}" for name in ("documents", "tokens", "bytes")]
            packed = [f"{entry['rows']:,}"] if "rows" in entry else []
            rows.append([split, *numbers, f"{entry['bytes'] / entry['tokens']:.3f}", *packed])
    return in_columns(rows)


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines
