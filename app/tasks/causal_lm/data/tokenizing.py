"""Texts, or prompts and answers, become a token folder, by many processes.

The documents are divided into parts, by the sources alone. Processes write the parts, and this one puts them together in their
order, so the folder has the same bytes with any number of processes. Finished parts stay next to the folder until it is
complete, each under a hash of all that it depends on: a command that was killed continues from them. A part is a folder:

    tokens      uint16 or uint32, the tokens of all documents, one after another
    documents   uint64 [D, 2]: tokens and bytes of text of each
    counted     bool [N], only where not all tokens count
    about.json  SHA-256 of each file, and how many rows were left out, by reason
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.data.order import MASK64, derive_key, mix64_array
from app.data.preprocessing import NO_LOCKS, in_order, progress
from app.errors import DataError
from app.files.atomic_files import Hashed, made_whole, sha256_of
from app.tasks.causal_lm.data import store, texts
from app.tasks.causal_lm.data.chat import Examples, Unusable
from app.tasks.causal_lm.data.texts import Piece, Texts
from app.tasks.causal_lm.data.token_writer import writing
from app.tasks.causal_lm.data.tokenizers import Tokenizer

_FORMAT = 1  # of parts: those of another are made again
_ABOUT = "about.json"
_BATCH_TEXTS, _BATCH_CHARACTERS = 256, 1 << 20
_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to write."""

    tokenizer: Tokenizer
    sources: Mapping[str, Texts]
    """By split; train at least."""
    shares: tuple[float, float] = (0.0, 0.0)
    """Shares of the training documents that become validation and test documents."""
    sequence_length: int | None = None
    """Targets of a packed row; None: rows are not packed."""
    prompts: bool = False
    """Whether rows are examples of prompts and answers."""
    too_long: Literal["cut", "leave-out"] = "cut"
    """What to do with examples that are longer than a row; longer texts become several pieces."""

    @property
    def dtype(self) -> str:
        """Type of tokens in parts."""
        return "<u2" if self.tokenizer.about["vocab_size"] <= 1 << 16 else "<u4"

    def key(self, part: Sequence[Piece], found: Texts) -> str:
        """Return a hash of all that a part depends on."""
        how = {
            "format": _FORMAT,
            "tokenizer": self.tokenizer.about["digest"],
            "versions": [version("tokenizers"), version("transformers")],
            "asked": asdict(found.asked),
            "prompts": [self.too_long, self.sequence_length] if self.prompts else None,
            "pieces": [asdict(piece) for piece in part],
        }
        return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:32]


def columns_of(found: Texts) -> tuple[str, ...]:
    """Return the columns with prompts and answers, by the usual names. Raises DataError."""
    there: Sequence[str] = []
    for piece in chain.from_iterable(found.parts):
        try:
            there = next((list(row) for _, row in texts.rows(piece, found) if not isinstance(row, str)), [])
        except DataError:
            if not found.asked.skip_unreadable:
                raise
        if there:
            break
    for names in (("prompt", "completion"), ("messages",), ("conversations",)):
        if set(names) <= set(there):
            return names
    raise DataError(
        f"--prompts: the first row has the columns {', '.join(map(repr, there))}, neither prompt and "
        "completion nor messages: choose columns with --column PROMPT,COMPLETION or --column MESSAGES"
    )


def tokenize(out: Path, job: Job, workers: int) -> str:
    """Write the token folder `out` and return what there is to report of it.

    Raises DataError if it exists, a source cannot be read, or a split would be empty.
    """
    if out.exists() or out.is_symlink():
        raise DataError(f"{out} already exists, and no files are replaced: choose another --out, or remove it")
    started_s = time.perf_counter()
    try:
        with parts_folder(out) as parts:
            done, cpu_s, megabytes = _write_parts(job, parts, workers)
            left_out = _put_together(out, job, parts)
            shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror or error}. Free space there, or choose another folder"
        ) from error
    lines = [f"written to {out}; in a recipe, set data.path={out}", *store.table(store.about(out))]
    for what, count in sorted(left_out.items()):
        lines.append(f"{'' if what.endswith((', kept', ', truncated there')) else 'left out: '}{count:,} x {what}")
    lines += dict.fromkeys(line for found in job.sources.values() for line in found.not_read)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    on_disk = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    speed = f"{megabytes / cpu_s:.2f} MB/s per core, " if cpu_s and megabytes else ""
    took = f"{time.perf_counter() - started_s:.1f} s by {workers} process{'es' if workers > 1 else ''}"
    took += f"; {done} of {sum(len(found.parts) for found in job.sources.values())} parts were already done" if done else ""
    return "\n".join([*lines, f"{on_disk} on disk; {speed}{took}\n"])


@contextmanager
def parts_folder(out: Path) -> Iterator[Path]:
    """Give the folder with the parts of what becomes `out`, to this process alone.

    Raises DataError if another process uses it, and OSError if it cannot be written.
    """
    folder = out.with_name(f".{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DataError(f"{out} is being written by another process: wait for it, or choose another --out") from None
            if error.errno not in NO_LOCKS:
                raise
        for remains in folder.glob(".*.tmp"):
            shutil.rmtree(remains, ignore_errors=True)
        yield folder


def _write_parts(job: Job, parts: Path, workers: int) -> tuple[int, float, float]:
    """Write the parts that are missing; return how many were there, and CPU seconds and megabytes of the others."""
    every = {job.key(part, found): (part, found) for found in job.sources.values() for part in found.parts}
    sizes = {key: sum(piece.size for piece in part) for key, (part, _) in every.items()}
    to_do = [key for key in every if not _is_done(parts / key)]

    def write(place: range) -> tuple[int, float]:
        key = to_do[place.start]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of the library's threads each process would have as many as cores
        began_s = time.process_time()
        part, found = every[key]
        names = ("tokens", "documents", *(["counted"] if job.prompts else []))
        with made_whole(parts / key) as temporary, ExitStack() as opened:
            files = {name: Hashed(opened.enter_context((temporary / name).open("wb"))) for name in names}
            left_out = _PartWriter(found, job, files).write(part)
            about = {"files": {name: file.finish() for name, file in files.items()}, "left_out": left_out}
            (temporary / _ABOUT).write_text(json.dumps(about))
        return sizes[key], time.process_time() - began_s

    cpu_s, size = 0.0, sum(sizes[key] for key in to_do)
    with progress("tokenizing", size, "bytes") as advance:
        for finished, took_s in in_order(write, len(to_do), piece=1, processes=workers):
            advance(finished)
            cpu_s += took_s
    return len(every) - len(to_do), cpu_s, size / 1e6


def _is_done(part: Path) -> bool:
    """Return whether a part is there as it was written; remove a damaged one."""
    if not part.exists():
        return False
    try:
        files = json.loads((part / _ABOUT).read_text())["files"]
        is_whole = all(sha256_of(part / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        shutil.rmtree(part)
    return is_whole


Located = tuple[Piece, int, Mapping[str, Any]]


class _PartWriter:
    """Tokenizes the rows of a part into its files."""

    def __init__(self, found: Texts, job: Job, files: Mapping[str, Hashed]) -> None:
        self._found, self._job, self._files = found, job, files
        self._left_out = Counter[str]()

    def write(self, part: Sequence[Piece]) -> Counter[str]:
        """Write all documents of a part; return how many rows were left out, by reason."""
        rows = chain.from_iterable(map(self._rows, part))
        if self._job.prompts:
            self._write_examples(rows)
        else:
            self._write_texts(rows)
        return self._left_out

    def _rows(self, piece: Piece) -> Iterator[Located]:
        try:
            for number, row in texts.rows(piece, self._found):
                if isinstance(row, str):
                    self._refuse(piece, number, row)
                else:
                    yield piece, number, row
        except DataError:
            if not self._found.asked.skip_unreadable or not Path(piece.path).is_file():
                raise
            self._left_out["file that cannot be read to its end"] += 1

    def _refuse(self, piece: Piece, number: int, why: str) -> None:
        if not self._found.asked.skip_unreadable:
            raise DataError(f"{texts.place(piece, number)}: {why}. Correct it, or skip such rows with --skip-unreadable")
        self._left_out["unreadable row"] += 1

    def _write_texts(self, rows: Iterable[Located]) -> None:
        column, tokenizer = self._found.asked.columns[0], self._job.tokenizer
        batch: list[str] = []
        sizes: list[int] = []
        characters = 0
        for piece, number, row in rows:
            text = row[column]
            if text is None or (isinstance(text, str) and not text.strip()):
                self._left_out["empty document"] += 1
                continue
            if not isinstance(text, str):
                self._refuse(piece, number, f"column {column!r} holds {type(text).__name__}, not text")
                continue
            try:
                sizes.append(len(text.encode()))
            except UnicodeEncodeError as error:
                self._refuse(piece, number, f"not UTF-8 ({error.reason})")
                continue
            batch.append(text)
            characters += len(text)
            if len(batch) == _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
                self._append(tokenizer.documents(batch), sizes)
                batch, sizes, characters = [], [], 0
        self._append(tokenizer.documents(batch), sizes)

    def _write_examples(self, rows: Iterable[Located]) -> None:
        job = self._job
        examples, token_bytes = Examples(job.tokenizer, self._found.asked.columns), job.tokenizer.token_bytes.astype(np.int64)
        most = (job.sequence_length or 0) + 1
        for piece, number, row in rows:
            try:
                example, counted, is_merged = examples(row)
            except Unusable as error:
                self._refuse(piece, number, str(error))
                continue
            if len(example) > most:
                truncated = ", truncated there" if job.too_long == "cut" else ""
                self._left_out[f"example of more than {most:,} tokens{truncated}"] += 1
                if not truncated:
                    continue
                example, counted = example[:most], counted[:most]
            if not counted[1:].any():
                self._left_out["example without an answer"] += 1
                continue
            if is_merged:
                self._left_out["example whose answer begins within the last token of its prompt, kept"] += 1
            self._append([example], [int(token_bytes.take(example).sum())])
            self._files["counted"].write(counted.tobytes())

    def _append(self, documents: Sequence[np.ndarray], text_bytes: Sequence[int]) -> None:
        if documents:
            self._files["tokens"].write(np.concatenate(documents).astype(self._job.dtype).tobytes())
            self._files["documents"].write(np.array([[*map(len, documents)], text_bytes], "<u8").T.tobytes())


def _put_together(out: Path, job: Job, parts: Path) -> Counter[str]:
    """Write the token folder from the parts; return how many rows were left out, by reason."""
    tokenizer, documents, left_out = job.tokenizer, Counter[str](), Counter[str]()
    with writing(
        out,
        tokenizer.about,
        tokenizer.files(),
        token_bytes=tokenizer.token_bytes,
        sequence_length=job.sequence_length,
        answers=job.prompts,
    ) as writer:
        for source, found in job.sources.items():
            for part in found.parts:
                folder = parts / job.key(part, found)
                left_out.update(json.loads((folder / _ABOUT).read_text())["left_out"])
                ids, lengths = _mapped(folder / "tokens", job.dtype), _mapped(folder / "documents", "<u8").astype(np.int64)
                lengths, text_bytes = lengths.reshape(-1, 2).T
                counted = _mapped(folder / "counted", "?") if job.prompts else None
                names = np.full(len(lengths), source, object)
                if source == "train":
                    names = _splits_of(np.arange(len(lengths)) + documents.total(), job.shares)
                ends = np.cumsum(lengths)
                first = 0
                while first < len(ends):  # some documents at a time: a part may be larger than memory
                    begin = int(ends[first - 1]) if first else 0
                    last = max(first + 1, int(np.searchsorted(ends, begin + _AT_ONCE, "right")))
                    end = int(ends[last - 1])
                    for split in store.SPLITS:
                        chosen = names[first:last] == split
                        of_split = np.repeat(chosen, lengths[first:last])
                        writer.append(
                            split,
                            ids[begin:end][of_split],
                            lengths[first:last][chosen],
                            counted=None if counted is None else counted[begin:end][of_split],
                            text_bytes=int(text_bytes[first:last][chosen].sum()),
                        )
                        documents[split] += int(chosen.sum())
                    first = last
        wanted = {*job.sources, *(name for name, share in zip(store.SPLITS[1:], job.shares, strict=True) if share)}
        for split in store.SPLITS:
            if split in wanted and not documents[split]:
                raise DataError(
                    f"the split {split} would be empty: there are {documents.total()} documents in "
                    f"total (shares: {job.shares[0]:g} for validation, {job.shares[1]:g} for test). Change "
                    "the shares, or give other sources"
                )
    return left_out


def _mapped(path: Path, kind: str) -> np.ndarray:
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.empty(0, kind)


def _splits_of(numbers: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
    """Return the split of each training document, by its number among all, as str [n]: a hash of the number decides."""
    at = mix64_array(numbers.astype(np.uint64) ^ np.uint64(derive_key(0, "split of a document"))) / MASK64
    validation, test = shares
    return np.select([at < validation, at < validation + test], ["validation", "test"], "train").astype(object)
