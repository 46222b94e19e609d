"""Texts, or prompts and answers, become a token folder, by many processes.

The documents are divided into parts, by the sources alone. Processes make the parts, and this one puts them together in their
order: so the folder has the same bytes whatever the number of processes. Parts that are done stay beside the folder until it is
there (`parts`), each under a hash of what it is made of and how: a command that was killed goes on from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from app.data.hash64 import MASK64, derive_key, mix64_array
from app.data.many import in_order
from app.data.progress import progress
from app.errors import DataError
from app.tasks.causal_lm.data import text_files
from app.tasks.causal_lm.data.chat import Examples, Unusable
from app.tasks.causal_lm.data.texts import Asked, Piece, Texts
from app.tasks.causal_lm.data.tokenizers import Tokenizer
from app.tasks.causal_lm.data.writing import Writer, writing
from app.tasks.causal_lm.data_tools.parts import Parts, PartWriter, kept_for

SPLITS = ("train", "validation", "test")
_FORMAT = 1  # of parts: those of another are made again
_BATCH_TEXTS, _BATCH_CHARACTERS = 256, 1 << 20
_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be made."""

    tokenizer: Tokenizer
    sources: Mapping[str, Texts]
    """By split; train at least."""
    shares: tuple[float, float] = (0.0, 0.0)
    """Of the training documents: those that are validation and test documents instead."""
    sequence_length: int | None = None
    """Targets of a packed row; None: rows are not packed."""
    prompts: bool = False
    """Whether rows are examples of prompts and answers."""
    too_long: Literal["cut", "leave-out"] = "cut"
    """What becomes of examples that no row has room for; longer texts become several pieces."""
    skip_unreadable: bool = False
    """Leave out what cannot be read."""

    @property
    def dtype(self) -> str:
        """Of tokens in parts."""
        return "<u2" if self.tokenizer.about["vocab_size"] <= 1 << 16 else "<u4"


class Made(NamedTuple):
    """What was done."""

    left_out: Counter[str]
    """Rows by what they are."""
    not_read: list[Path]
    """Files in the folders of the sources that are of an unknown kind."""
    parts: int
    kept_parts: int
    """Those that an earlier command had made."""
    megabytes: float
    """Read by this one."""
    cpu_s: float
    """That its processes took for it."""


def columns_of(found: Texts) -> tuple[str, ...]:
    """Return the columns with prompts and answers, by the usual names. Raises DataError."""
    rows = chain.from_iterable(text_files.rows(piece, found.asked, found.datasets) for part in found.parts for piece in part)
    there: Sequence[str] = next((list(row) for _, row in rows if not isinstance(row, str)), [])
    for names in (("prompt", "completion"), ("messages",), ("conversations",)):
        if set(names) <= set(there):
            return names
    raise DataError(
        f"--prompts: the first row has the columns {', '.join(map(repr, there))}, neither prompt and "
        "completion nor messages: choose columns with --column PROMPT,COMPLETION or --column MESSAGES"
    )


def tokenize(out: Path, job: Job, workers: int) -> Made:
    """Write the token folder `out`. Raises DataError if it is there, a source cannot be read, or a split would be empty."""
    if out.exists() or out.is_symlink():
        raise DataError(f"{out} already exists, and no files are replaced: choose another --out, or remove it")
    try:
        with kept_for(out) as parts:
            made = _make(job, parts, workers)
            _put_together(out, job, parts, made.left_out)
            parts.remove()
            return made
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror or error}. Free space there, or choose another folder"
        ) from error


def _make(job: Job, parts: Parts, workers: int) -> Made:
    """Make the parts that are not there yet."""
    of_parts = {_key(part, found.asked, job): (part, found) for found in job.sources.values() for part in found.parts}
    sizes = {key: sum(piece.size for piece in part) for key, (part, _) in of_parts.items()}
    to_do = [key for key in of_parts if not parts.is_done(key)]

    def make(piece: range) -> tuple[int, float]:
        key = to_do[piece.start]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of the library's threads each process would have as many as cores
        began_s = time.process_time()
        with parts.making(key, job.dtype, answers=job.prompts) as writer:
            _write(*of_parts[key], job, writer)
        return sizes[key], time.process_time() - began_s

    cpu_s, size = 0.0, sum(sizes[key] for key in to_do)
    with progress("tokenizing", size, "bytes") as advance:
        for done, took_s in in_order(make, len(to_do), piece=1, processes=workers):
            advance(done)
            cpu_s += took_s
    others = [path for found in job.sources.values() for path in found.left_out]
    return Made(Counter(), others, len(of_parts), len(of_parts) - len(to_do), size / 1e6, cpu_s)


def _key(part: Sequence[Piece], asked: Asked, job: Job) -> str:
    """Return a hash of all that a part depends on."""
    how = {
        "format": _FORMAT,
        "tokenizer": job.tokenizer.about["digest"],
        "versions": [version("tokenizers"), version("transformers")],
        "asked": asdict(asked),
        "prompts": [job.too_long, job.sequence_length] if job.prompts else None,
        "skip_unreadable": job.skip_unreadable,
        "pieces": [asdict(piece) for piece in part],
    }
    return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:32]


def _write(part: Sequence[Piece], found: Texts, job: Job, writer: PartWriter) -> None:
    rows = chain.from_iterable(_readable(piece, found, job, writer) for piece in part)
    if job.prompts:
        _write_examples(rows, found.asked, job, writer)
    else:
        _write_texts(rows, found.asked.columns[0], job, writer)


Located = tuple[Piece, int, Mapping[str, Any]]


def _readable(piece: Piece, found: Texts, job: Job, writer: PartWriter) -> Iterator[Located]:
    try:
        for number, row in text_files.rows(piece, found.asked, found.datasets):
            if isinstance(row, str):
                _refuse(piece, number, row, job, writer)
            else:
                yield piece, number, row
    except DataError:
        if not job.skip_unreadable or not Path(piece.path).is_file():
            raise
        writer.leave_out("file that cannot be read to its end")


def _refuse(piece: Piece, number: int, why: str, job: Job, writer: PartWriter) -> None:
    if not job.skip_unreadable:
        raise DataError(f"{text_files.place(piece, number)}: {why}. Correct it, or skip such rows with --skip-unreadable")
    writer.leave_out("unreadable row")


def _write_texts(rows: Iterator[Located], column: str, job: Job, writer: PartWriter) -> None:
    batch: list[str] = []
    sizes: list[int] = []

    def write() -> None:
        writer.append(job.tokenizer.documents(batch), sizes, [])
        batch.clear()
        sizes.clear()

    characters = 0
    for piece, number, row in rows:
        text = row[column]
        if text is None or (isinstance(text, str) and not text.strip()):
            writer.leave_out("empty document")
            continue
        try:
            size = len(text.encode()) if isinstance(text, str) else None
        except UnicodeEncodeError as error:
            _refuse(piece, number, f"not UTF-8 ({error.reason})", job, writer)
            continue
        if size is None:
            _refuse(piece, number, f"column {column!r} holds {type(text).__name__}, not text", job, writer)
            continue
        batch.append(text)
        sizes.append(size)
        characters += len(text)
        if len(batch) == _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
            write()
            characters = 0
    write()


def _write_examples(rows: Iterator[Located], asked: Asked, job: Job, writer: PartWriter) -> None:
    examples, token_bytes = Examples(job.tokenizer, asked.columns), job.tokenizer.token_bytes.astype(np.int64)
    most = (job.sequence_length or 0) + 1
    for piece, number, row in rows:
        try:
            tokens, counted, is_merged = examples(row)
        except Unusable as error:
            _refuse(piece, number, str(error), job, writer)
            continue
        if len(tokens) > most:
            writer.leave_out(f"example of more than {most:,} tokens{', truncated there' if job.too_long == 'cut' else ''}")
            if job.too_long == "leave-out":
                continue
            tokens, counted = tokens[:most], counted[:most]
        if not counted[1:].any():
            writer.leave_out("example without an answer")
            continue
        if is_merged:
            writer.leave_out("example whose answer begins within the last token of its prompt, kept")
        writer.append([tokens], [int(token_bytes.take(tokens).sum())], [counted])


def _put_together(out: Path, job: Job, parts: Parts, left_out: Counter[str]) -> None:
    tokenizer, documents = job.tokenizer, Counter[str]()
    with writing(
        out,
        tokenizer.about,
        tokenizer.files(),
        token_bytes=tokenizer.token_bytes,
        sequence_length=job.sequence_length,
        answers=job.prompts,
    ) as writer:
        for split, found in job.sources.items():
            for part in found.parts:
                number = sum(documents.values()) if split == "train" else 0
                left_out.update(_append(parts, _key(part, found.asked, job), split, job, (writer, number, documents)))
        wanted = {*job.sources, *(name for name, share in zip(SPLITS[1:], job.shares, strict=True) if share)}
        for split in SPLITS:
            if split in wanted and not documents[split]:
                raise DataError(
                    f"the split {split} would be empty: there are {sum(documents.values())} documents in "
                    f"total (shares: {job.shares[0]:g} for validation, {job.shares[1]:g} for test). Change "
                    "the shares, or give other sources"
                )


def _append(parts: Parts, key: str, split: str, job: Job, to: tuple[Writer, int, Counter[str]]) -> Mapping[str, int]:
    """Append a part to the splits of its documents, the first of which has a number; return what it left out."""
    writer, number, written = to
    part = parts.open(key, job.dtype)
    ends = np.cumsum(part.documents[:, 0])
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, begin + _AT_ONCE, "right")))
        some, end = part.documents[first:last], int(ends[last - 1])
        splits = _splits_of(np.arange(number + first, number + last), job.shares if split == "train" else (0.0, 0.0))
        for place in np.unique(splits).tolist():
            name, of_it = split if split != "train" else SPLITS[place], splits == place
            tokens = np.repeat(of_it, some[:, 0])
            writer.append(
                name,
                part.tokens[begin:end][tokens],
                some[of_it, 0],
                counted=None if part.counted is None else part.counted[begin:end][tokens],
                text_bytes=int(some[of_it, 1].sum()),
            )
            written[name] += int(of_it.sum())
        first = last
    return part.left_out


def _splits_of(numbers: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
    """Return of each document, by its number among all, its place in SPLITS, int [n]: a hash of the number decides."""
    at = mix64_array(numbers.astype(np.uint64) ^ np.uint64(derive_key(0, "split of a document"))) / MASK64
    return np.where(at < shares[0], 1, np.where(at < shares[0] + shares[1], 2, 0))
