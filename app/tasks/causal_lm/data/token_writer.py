"""Writes token folders (`store` describes them): complete or not at all, and the same bytes for the same documents.

`tokenize` lets many processes turn texts, or prompts and answers, into tokens. How the sources are split into parts depends on
the sources alone, and this process appends the parts in their order, so the folder has the same bytes with any number of
processes.

Rows are packed by best fit. Documents are never cut, unless one is longer than a row. The longest are placed first, each into
the row where the least room is left ("best fit decreasing", as in Ding et al. 2024, "Fewer Truncations Improve Language
Modeling").
"""

from __future__ import annotations

import json
import os
import shutil
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.data.data_files import new_folder
from app.data.order import MASK64, derive_key, mix64_array
from app.data.preprocessing import in_order, progress
from app.environment.topology import listed
from app.errors import DataError
from app.files.atomic_files import Hashed
from app.tasks.causal_lm.data import store, texts
from app.tasks.causal_lm.data.store import ABOUT, FORMAT, TOKEN_BYTES, TOKENIZER, Pieces, blocks_digest
from app.tasks.causal_lm.data.texts import FileRange, SourceOptions, Texts
from app.tasks.causal_lm.data.tokenizers import Examples, Tokenizer, Unusable

_BATCH_TEXTS, _BATCH_CHARACTERS = 256, 1 << 20
_BLOCK_DOCUMENTS = 1024


def tokenize(
    folder: Path,
    tokenizer: Tokenizer,
    sources: Mapping[str, Texts],
    options: SourceOptions,
    *,
    sequence_length: int | None,
    workers: int,
) -> str:
    """Write a token folder and return a report.

    `sources` are the texts by split, train at least. With a `sequence_length` rows are packed. Raises DataError if the folder
    exists, a source cannot be read, or a split would be empty.
    """
    started_s, counts, shares = time.perf_counter(), Counter[str](), options.shares
    parts = [(split, part) for split, found in sources.items() for part in found.parts]
    sizes = [sum(piece.size_bytes for piece in part) for _, part in parts]
    with writing(
        folder,
        tokenizer.about,
        tokenizer.files(),
        token_bytes=tokenizer.token_bytes,
        sequence_length=sequence_length,
        answers=options.prompts,
    ) as writer:

        def tokenize_part(place: range) -> tuple[Path, Counter[str]]:
            part = writer.folder / f"part-{place.start}"
            pieces, part_counts = parts[place.start][1], Counter[str]()
            if options.prompts:
                batches = _example_batches(pieces, tokenizer, options, part_counts, longest=(sequence_length or 0) + 1)
            else:
                batches = _text_batches(pieces, tokenizer, options, part_counts)
            _write_part(part, batches)
            return part, part_counts

        with progress("tokenizing", sum(sizes), "bytes") as advance:
            results = in_order(tokenize_part, len(parts), piece=1, processes=workers)
            for (source, _), size, (part, part_counts) in zip(parts, sizes, results, strict=True):
                counts += part_counts
                _append_part(writer, part, source, shares, answers=options.prompts)
                shutil.rmtree(part)
                advance(size)
        for split in store.SPLITS:
            if (split in sources or shares.get(split)) and not writer.documents[split]:
                left_out = [f"{what}: {count:,}" for what, count in sorted(counts.items()) if count]
                found = listed([f"documents that can be used: {writer.documents.total():,}", *left_out])
                raise DataError(f"the split {split} would be empty: {found}. Give other sources or shares")
    lines = [f"written to {folder}; in a recipe, set data.path={folder}"]
    for split, entry in store.about(folder)["splits"].items():
        rows = f", {entry['rows']:,} rows" if "rows" in entry else ""
        documents = f"{entry['documents']:,} document{'s' * (entry['documents'] != 1)}"
        per_token = f"{entry['bytes'] / entry['tokens']:.3f} bytes per token"
        lines.append(f"{split}: {documents}, {entry['tokens']:,} tokens, {per_token}{rows}")
    lines += [f"{what}: {count:,}" for what, count in sorted(counts.items())]
    lines += dict.fromkeys(line for found in sources.values() for line in found.not_read)
    return "\n".join([*lines, f"{time.perf_counter() - started_s:.1f} s, number of processes: {workers}\n"])


Batch = tuple[list[np.ndarray], list[int], np.ndarray | None]
"""Tokens of each document, bytes of text of each, and flags of the tokens of all that count."""


def _write_part(folder: Path, batches: Iterable[Batch]) -> None:
    """Write the tokens of a part into three files."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise each process has a thread for each core
    folder.mkdir()
    with ExitStack() as opened:
        names = ("documents", "tokens", "counted")
        documents, tokens, counted = (opened.enter_context((folder / name).open("wb")) for name in names)
        for batch, text_bytes, flags in batches:
            documents.write(np.array([[*map(len, batch)], text_bytes], np.int64).T.tobytes())
            tokens.write(np.concatenate(batch).astype(np.uint32).tobytes())
            counted.write(b"" if flags is None else flags.tobytes())


def _append_part(writer: Writer, folder: Path, source: str, shares: Mapping[str, float], *, answers: bool) -> None:
    documents = np.fromfile(folder / "documents", np.int64).reshape(-1, 2)
    with (folder / "tokens").open("rb") as tokens_file, (folder / "counted").open("rb") as counted_file:
        for first in range(0, len(documents), _BLOCK_DOCUMENTS):  # a part may be larger than memory
            lengths, text_bytes = documents[first : first + _BLOCK_DOCUMENTS].T
            size = int(lengths.sum())
            tokens = np.fromfile(tokens_file, np.uint32, size)
            counted = np.fromfile(counted_file, bool, size) if answers else None
            splits = np.full(len(lengths), source, object)
            if source == "train":
                splits = _split_of(np.arange(len(lengths)) + writer.documents.total(), shares)
            for split in store.SPLITS:
                chosen = splits == split
                of_split = np.repeat(chosen, lengths)
                writer.append(
                    split,
                    tokens[of_split],
                    lengths[chosen],
                    counted=None if counted is None else counted[of_split],
                    text_bytes=int(text_bytes[chosen].sum()),
                )


def _split_of(numbers: np.ndarray, shares: Mapping[str, float]) -> np.ndarray:
    """Return the split of each training document, by its number among all, as str [n]: a hash of the number decides."""
    at = mix64_array(numbers.astype(np.uint64) ^ np.uint64(derive_key(0, "split of a document"))) / MASK64
    validation, test = shares.get("validation", 0.0), shares.get("test", 0.0)
    return np.select([at < validation, at < validation + test], ["validation", "test"], "train").astype(object)


def _rows(part: Sequence[FileRange], options: SourceOptions, counts: Counter[str], read: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield what `read` makes of each row. Raises DataError for a row that cannot be read, or counts it."""
    for piece in part:
        for position, row in texts.rows(piece, options):
            try:
                if isinstance(row, str):
                    raise Unusable(row)
                value = read(row)
            except Unusable as error:
                if not options.skip_unreadable:
                    raise DataError(
                        f"{texts.place(piece, position)}: {error}. Correct it, or skip such rows with --skip-unreadable"
                    ) from error
                counts["unreadable rows left out"] += 1
            else:
                yield value


def _text_batches(
    part: Sequence[FileRange], tokenizer: Tokenizer, options: SourceOptions, counts: Counter[str]
) -> Iterator[Batch]:
    column = options.columns[0]

    def read(row: Mapping[str, Any]) -> tuple[str, int]:
        text = row[column] if row[column] is not None else ""
        if not isinstance(text, str):
            raise Unusable(f"column {column!r} holds {type(text).__name__}, not text")
        try:
            return text, len(text.encode())
        except UnicodeEncodeError as error:
            raise Unusable(f"not UTF-8 ({error.reason})") from error

    batch: list[str] = []
    sizes: list[int] = []
    for text, size in _rows(part, options, counts, read):
        if not text.strip():
            counts["empty documents left out"] += 1
            continue
        batch.append(text)
        sizes.append(size)
        if len(batch) == _BATCH_TEXTS or sum(sizes) >= _BATCH_CHARACTERS:
            yield tokenizer.documents(batch), sizes, None
            batch, sizes = [], []
    if batch:
        yield tokenizer.documents(batch), sizes, None


def _example_batches(
    part: Sequence[FileRange], tokenizer: Tokenizer, options: SourceOptions, counts: Counter[str], *, longest: int
) -> Iterator[Batch]:
    token_bytes = tokenizer.token_bytes.astype(np.int64)
    for example in _rows(part, options, counts, Examples(tokenizer, options.columns)):
        counts[f"examples truncated to {longest:,} tokens"] += len(example[0]) > longest
        tokens, counted = (array[:longest] for array in example)
        if counted[1:].any():
            yield [tokens], [int(token_bytes.take(tokens).sum())], counted
        else:
            counts["examples without an answer left out"] += 1


@contextmanager
def writing(
    folder: Path,
    tokenizer: Mapping[str, Any],
    files: Mapping[str, bytes],
    *,
    token_bytes: np.ndarray | None,
    sequence_length: int | None = None,
    answers: bool = False,
) -> Iterator[Writer]:
    """Give a writer to append documents to; `folder` appears when the block is done.

    `tokenizer` is what tokens.json records of it, with at least vocab_size and digest; `files` are its files, by name.
    `token_bytes` is int [vocab_size], bytes of text that each token stands for; None: unknown. With a `sequence_length` the
    rows are packed, each with as many targets. With `answers` each document has flags of the tokens that count. Raises
    DataError, also if the folder exists.
    """
    with new_folder(folder) as temporary, ExitStack() as opened:
        writer = Writer(temporary, opened, tokenizer, sequence_length=sequence_length, answers=answers)
        yield writer
        writer.finish(files, token_bytes)


class Writer:
    """Appends documents to the splits of a token folder."""

    def __init__(
        self, folder: Path, opened: ExitStack, tokenizer: Mapping[str, Any], *, sequence_length: int | None, answers: bool
    ) -> None:
        """Take an empty folder; `opened` closes the files in the end, the rest as in `writing`."""
        self.folder = folder
        """The folder under its temporary name."""
        self.documents = Counter[str]()
        """Number of documents in each split."""
        self._opened, self._tokenizer = opened, tokenizer
        self._sequence_length, self._answers = sequence_length, answers
        self._dtype = "uint16" if tokenizer["vocab_size"] <= 1 << 16 else "uint32"
        self._splits: dict[str, _SplitWriter] = {}

    def append(
        self, split: str, tokens: np.ndarray, lengths: np.ndarray, *, counted: np.ndarray | None = None, text_bytes: int = 0
    ) -> None:
        """Append documents, one after another.

        Args:
            split: Name of the split.
            tokens: Tokens of all these documents, of any integer type, [n].
            lengths: Tokens of each document, int [d], none of them 0.
            counted: bool [n], where `answers`: which tokens count as targets.
            text_bytes: Bytes of the texts, together.
        """
        assert int(np.sum(lengths)) == len(tokens), "the lengths do not add up to the number of tokens"
        if not len(tokens):
            return
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer["vocab_size"]:
            raise DataError(
                f"the tokenizer gave tokens in {tokens.min()}..{tokens.max()}, but its vocabulary has "
                f"{self._tokenizer['vocab_size']} tokens: use the tokenizer of these tokens"
            )
        if split not in self._splits:
            self._splits[split] = _SplitWriter(self.folder / split, self._opened, self._dtype, answers=self._answers)
        self.documents[split] += len(lengths)
        self._splits[split].append(tokens, np.asarray(lengths, np.int64), counted, text_bytes)

    def finish(self, files: Mapping[str, bytes], token_bytes: np.ndarray | None) -> None:
        """Write the rest, and tokens.json; `files` and `token_bytes` as in `writing`."""
        (self.folder / TOKENIZER).mkdir()
        others = {f"{TOKENIZER}/{name}": content for name, content in sorted(files.items())}
        if token_bytes is not None:
            others = {TOKEN_BYTES: token_bytes.astype("<u2").tobytes(), **others}
        splits = {name: split.finish(self._sequence_length, token_bytes) for name, split in sorted(self._splits.items())}
        about = {
            "format": FORMAT,
            "tokenizer": {**self._tokenizer, "files": sorted(files)},
            "dtype": self._dtype,
            "packed": self._sequence_length is not None,
            "sequence_length": self._sequence_length,
            "answers": self._answers,
            "splits": splits,
            "files": {name: _File(self.folder / name, self._opened).finished(content) for name, content in others.items()},
        }
        _File(self.folder / ABOUT, self._opened).finished((json.dumps(about, indent=1) + "\n").encode())


class _File(Hashed):
    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._path = path
        super().__init__(opened.enter_context(path.open("wb")))

    def finished(self, content: bytes = b"") -> dict[str, Any]:
        """Write the last content and close the file; return its entry in tokens.json."""
        self.write(content)
        return {"bytes": self.size_bytes, "sha256": self.finish(), "blocks": blocks_digest(self._path)}


class _SplitWriter:
    """The files of one split."""

    def __init__(self, path: Path, opened: ExitStack, dtype: str, *, answers: bool) -> None:
        self._path, self._opened = path, opened
        self._dtype = np.dtype(dtype).newbyteorder("<").str
        self._tokens, self._documents = self._file("bin"), self._file("documents")
        self._counted = self._file("counted") if answers else None
        self._flags = np.empty(0, bool)  # too few for a whole byte yet
        self._documents.write(np.zeros(1, "<u8").tobytes())
        self._num_tokens = self._num_documents = self._text_bytes = 0

    def _file(self, suffix: str) -> _File:
        return _File(self._path.with_name(f"{self._path.name}.{suffix}"), self._opened)

    def append(self, tokens: np.ndarray, lengths: np.ndarray, counted: np.ndarray | None, text_bytes: int) -> None:
        """Append documents, as `Writer.append`."""
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._documents.write((np.cumsum(lengths) + self._num_tokens).astype("<u8").tobytes())
        self._num_tokens += len(tokens)
        self._num_documents += len(lengths)
        self._text_bytes += text_bytes
        if self._counted is not None:
            assert counted is not None, "with answers, each token has a flag"
            flags = np.concatenate([self._flags, counted.astype(bool)])
            whole = len(flags) // 8 * 8
            self._counted.write(np.packbits(flags[:whole], bitorder="little").tobytes())
            self._flags = flags[whole:]

    def finish(self, sequence_length: int | None, token_bytes: np.ndarray | None) -> dict[str, Any]:
        """Write the files that need all documents; return the entry of the split in tokens.json."""
        files = {"bin": self._tokens.finished(), "documents": self._documents.finished()}
        if self._counted is not None:
            files["counted"] = self._counted.finished(np.packbits(self._flags, bitorder="little").tobytes())
        entry: dict[str, Any] = {"tokens": self._num_tokens, "documents": self._num_documents, "bytes": self._text_bytes}
        if token_bytes is not None:
            tokens, step, sizes = self._mapped("bin", self._dtype), 1 << 22, token_bytes.astype(np.int64)
            entry["token_bytes"] = sum(int(sizes.take(tokens[at : at + step]).sum()) for at in range(0, len(tokens), step))
        if sequence_length is not None:
            spans, rows = packed(self._mapped("documents", "<u8").astype(np.int64), sequence_length)
            targets = spans[:, 1] - 1
            if self._counted is not None:
                targets = _num_counted(self._mapped("counted", "u1"), spans)
            arrays = {"pieces": (spans, "<i8"), "rows": (rows, "<i8"), "counts": (np.add.reduceat(targets, rows[:-1]), "<i4")}
            for suffix, (array, kind) in arrays.items():
                files[suffix] = self._file(suffix).finished(array.astype(kind).tobytes())
            entry |= {"rows": len(rows) - 1, "pieces": len(spans)}
        return {**entry, "files": {f"{self._path.name}.{suffix}": file for suffix, file in files.items()}}

    def _mapped(self, suffix: str, kind: str) -> np.ndarray:
        return np.asarray(np.memmap(self._path.with_name(f"{self._path.name}.{suffix}"), kind, mode="r"))


def _num_counted(bits: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return how many tokens but the first count in each span, int64 [P]."""
    numbers = (
        int(np.unpackbits(bits[begin // 8 : -(-end // 8)], bitorder="little")[begin % 8 :][: end - begin].sum())
        for begin, end in zip((spans[:, 0] + 1).tolist(), spans.sum(1).tolist(), strict=True)
    )
    return np.fromiter(numbers, np.int64, len(spans))


def packed(documents: np.ndarray, sequence_length: int) -> Pieces:
    """Return the rows for documents that begin at int64 [D + 1], the last entry being the end of the last.

    A row has at most `sequence_length` + 1 tokens: the targets, and the token before the first. A longer document is cut into
    pieces that begin with the last token of the piece before: each of its tokens but the first is a target once.
    """
    starts, lengths = documents[:-1], np.diff(documents)
    number = np.maximum(-((1 - lengths) // sequence_length), 1)  # ceil((length - 1) / sequence_length)
    inside = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    begin = inside * sequence_length
    length = np.minimum(np.repeat(lengths, number) - begin, sequence_length + 1)
    row = best_fit(length, sequence_length + 1)
    order = np.argsort(row, kind="stable")
    spans = np.stack([np.repeat(starts, number) + begin, length], 1)[order]
    return Pieces(spans, np.concatenate([[0], np.cumsum(np.bincount(row, minlength=0))]))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row, int64 [P], of each piece of the given lengths (int64 [P], in 1 .. capacity)."""
    row_of = np.empty(len(lengths), np.int64)
    spaces: list[int] = []  # ascending: the numbers of tokens for which some rows have room
    rows_with = defaultdict[int, deque[int]](deque)
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space, row = capacity, num_rows
            num_rows += 1
        else:
            space = spaces[at]
            row = rows_with[space].popleft()
            if not rows_with[space]:
                del spaces[at]
        row_of[piece] = row
        if left := space - length:
            if not rows_with[left]:
                insort(spaces, left)
            rows_with[left].append(row)
    return row_of
