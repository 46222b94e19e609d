"""Writing token folders (`store` describes them): complete or not at all, and the same bytes for the same documents.

Packed rows are decided here, by best fit. Documents are never cut, unless one is longer than a row. The longest are placed
first, each into the row where the least room is left ("best fit decreasing", as in Ding et al. 2024, "Fewer Truncations Improve
Language Modeling"). Equal lengths are placed together, as in Krell et al. 2021, which gives the same rows and takes a loop over
lengths, not over documents.
"""

from __future__ import annotations

import errno
import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.files.atomic_files import Hashed, made_whole
from app.tasks.causal_lm.data.store import ABOUT, FORMAT, TOKEN_BYTES, TOKENIZER, Pieces, blocks_digest

_PIECES = 1 << 16


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
    """Give a writer to append documents to; when the block is done, `folder` exists, which must not exist before.

    `tokenizer` is what tokens.json records of it, with at least vocab_size and digest; `files` are its files, by name.
    `token_bytes` is int [vocab_size], bytes of text that each token stands for; None: unknown. With a `sequence_length` the
    rows are packed, each with so many targets. With `answers` each document has flags of the tokens that count. Raises
    DataError.
    """
    try:
        if folder.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        with made_whole(folder) as temporary, ExitStack() as opened:
            writer = Writer(temporary, opened, tokenizer, sequence_length=sequence_length, answers=answers)
            yield writer
            writer.finish(files, token_bytes)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Free space there, or choose another folder"
        ) from error


class Writer:
    """Appends documents to the splits of a token folder."""

    def __init__(
        self, folder: Path, opened: ExitStack, tokenizer: Mapping[str, Any], *, sequence_length: int | None, answers: bool
    ) -> None:
        """`opened` closes the files in the end; the rest as in `writing`."""
        self._folder, self._opened, self._tokenizer = folder, opened, tokenizer
        self._sequence_length, self._answers = sequence_length, answers
        self._dtype = "uint16" if tokenizer["vocab_size"] <= 1 << 16 else "uint32"
        self._splits: dict[str, _Split] = {}

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
        assert np.all(np.asarray(lengths) > 0), "a document without tokens"
        assert (counted is not None) == self._answers, "counted is needed for answers, and only for them"
        if not len(tokens):
            return
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer["vocab_size"]:
            raise DataError(
                f"the tokenizer gave tokens in {tokens.min()}..{tokens.max()}, but its vocabulary has "
                f"{self._tokenizer['vocab_size']} tokens: use the tokenizer of these tokens"
            )
        if split not in self._splits:
            self._splits[split] = _Split(self._folder / split, self._opened, self._dtype, answers=self._answers)
        self._splits[split].append(tokens, np.asarray(lengths, np.int64), counted, text_bytes)

    def finish(self, files: Mapping[str, bytes], token_bytes: np.ndarray | None) -> None:
        """Write the rest, and tokens.json; `files` and `token_bytes` as in `writing`."""
        if not self._splits:
            raise DataError("there are no tokens to write: all documents are empty")
        (self._folder / TOKENIZER).mkdir()
        others = {f"{TOKENIZER}/{name}": content for name, content in sorted(files.items())}
        if token_bytes is not None:
            assert len(token_bytes) == self._tokenizer["vocab_size"]
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
            "files": {name: _File(self._folder / name, self._opened).finished(content) for name, content in others.items()},
        }
        _File(self._folder / ABOUT, self._opened).finished((json.dumps(about, indent=1) + "\n").encode())


class _File(Hashed):
    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._path = path
        super().__init__(opened.enter_context(path.open("wb")))

    def finished(self, content: bytes = b"") -> dict[str, Any]:
        """Write the last content and close the file; return its entry in tokens.json."""
        self.write(content)
        return {"bytes": self.size_bytes, "sha256": self.finish(), "blocks": blocks_digest(self._path)}


class _Split:
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
        if self._counted is not None and counted is not None:
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
                bits = self._mapped("counted", "u1")
                targets = np.concatenate([_counted_in(bits, spans[at : at + _PIECES]) for at in range(0, len(spans), _PIECES)])
            arrays = {"pieces": (spans, "<i8"), "rows": (rows, "<i8"), "counts": (np.add.reduceat(targets, rows[:-1]), "<i4")}
            for suffix, (array, kind) in arrays.items():
                files[suffix] = self._file(suffix).finished(array.astype(kind).tobytes())
            entry |= {"rows": len(rows) - 1, "pieces": len(spans)}
        return {**entry, "files": {f"{self._path.name}.{suffix}": file for suffix, file in files.items()}}

    def _mapped(self, suffix: str, kind: str) -> np.ndarray:
        return np.asarray(np.memmap(self._path.with_name(f"{self._path.name}.{suffix}"), kind, mode="r"))


def _counted_in(bits: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return how many tokens but the first count in each span, int64 [P]."""
    return np.array(
        [
            int(np.unpackbits(bits[begin // 8 : -(-end // 8)], bitorder="little")[begin % 8 :][: end - begin].sum())
            for begin, end in zip((spans[:, 0] + 1).tolist(), spans.sum(1).tolist(), strict=True)
        ],
        np.int64,
    )


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
    rows_with: dict[int, np.ndarray] = {}
    number = 0

    def give(space: int, rows: np.ndarray) -> None:
        if not space or not len(rows):
            return
        if space in rows_with:
            rows = np.concatenate([rows_with[space], rows])
        else:
            insort(spaces, space)
        rows_with[space] = rows

    order = np.argsort(-lengths, kind="stable")
    for same_length in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        pieces = same_length
        while len(pieces):
            length = int(lengths[pieces[0]])
            at = bisect_left(spaces, length)
            # A row that has taken a piece and has room for another one has less room than before: it is the best fit again.
            space = spaces[at] if at < len(spaces) else capacity
            each = space // length
            needed = -(-len(pieces) // each)
            if at < len(spaces):
                available = rows_with.pop(spaces.pop(at))
                give(space, available[needed:])
                rows = available[:needed]
            else:
                rows = np.arange(number, number + needed)
                number += needed
            taken = min(len(pieces), len(rows) * each)
            row_of[pieces[:taken]] = np.repeat(rows, each)[:taken]
            pieces = pieces[taken:]
            filled, more = divmod(taken, each)
            give(space - each * length, rows[:filled])
            if more:
                give(space - more * length, rows[filled : filled + 1])
    return row_of
