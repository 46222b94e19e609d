"""Writing token folders (`store` says what is in them): whole or not at all, and the same bytes for the same documents."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.files.whole import Hashed, made_whole
from app.tasks.causal_lm.data.packing import packed
from app.tasks.causal_lm.data.store import ABOUT, FORMAT, TOKEN_BYTES, TOKENIZER, blocks_digest

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
    """Give what documents are appended to; when the block is done, `folder` is there, which must not be before.

    `tokenizer` is what is known of it, as JSON holds it, with at least vocab_size and digest; `files` are its files, by name.
    `token_bytes` is int [vocab_size], bytes of text that each token stands for; None: not known. With a `sequence_length` the
    rows are packed, of so many targets. With `answers` not all tokens count: each document says which do. Raises DataError.
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
        self,
        folder: Path,
        opened: ExitStack,
        tokenizer: Mapping[str, Any],
        *,
        sequence_length: int | None,
        answers: bool,
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
            tokens: Of any integer type, [n]: those of all these documents.
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
            self._splits[split] = _Split(self._folder, split, self._opened, answers=self._answers)
        self._splits[split].append(tokens.astype(self._dtype), np.asarray(lengths, np.int64), counted, text_bytes)

    def finish(self, files: Mapping[str, bytes], token_bytes: np.ndarray | None) -> None:
        """Write what is left, and tokens.json; `files` and `token_bytes` as in `writing`."""
        if not self._splits:
            raise DataError("there are no tokens to write: all documents are empty")
        others: dict[str, _File] = {}
        if token_bytes is not None:
            assert len(token_bytes) == self._tokenizer["vocab_size"]
            others[TOKEN_BYTES] = self._small(TOKEN_BYTES, token_bytes.astype("<u2").tobytes())
        (self._folder / TOKENIZER).mkdir()
        for name, content in sorted(files.items()):
            others[f"{TOKENIZER}/{name}"] = self._small(f"{TOKENIZER}/{name}", content)
        about = {
            "format": FORMAT,
            "tokenizer": {**self._tokenizer, "files": sorted(files)},
            "dtype": self._dtype,
            "packed": self._sequence_length is not None,
            "sequence_length": self._sequence_length,
            "answers": self._answers,
            "splits": {name: split.finish(self._sequence_length, token_bytes) for name, split in sorted(self._splits.items())},
            "files": {name: file.told() for name, file in others.items()},
        }
        self._small(ABOUT, (json.dumps(about, indent=1) + "\n").encode()).finish()

    def _small(self, name: str, content: bytes) -> _File:
        file = _File(self._folder / name, self._opened)
        file.write(content)
        return file


class _File(Hashed):
    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._path = path
        super().__init__(opened.enter_context(path.open("wb")))

    def told(self) -> dict[str, Any]:
        """Finish it; return what tells it from another."""
        return {"bytes": self.size_bytes, "sha256": self.finish(), "blocks": blocks_digest(self._path)}


class _Split:
    """The files of one split."""

    def __init__(self, folder: Path, name: str, opened: ExitStack, *, answers: bool) -> None:
        self._folder, self._name, self._opened = folder, name, opened
        self._tokens, self._documents = self._file("bin"), self._file("documents")
        self._counted = self._file("counted") if answers else None
        self._left = np.empty(0, bool)  # what makes no whole byte yet
        self._documents.write(np.zeros(1, "<u8").tobytes())
        self.tokens = self._number = self._text_bytes = 0
        self._dtype = "<u2"

    def _file(self, ending: str) -> _File:
        return _File(self._folder / f"{self._name}.{ending}", self._opened)

    def append(self, tokens: np.ndarray, lengths: np.ndarray, counted: np.ndarray | None, text_bytes: int) -> None:
        """Append documents, as `Writer.append` says, of the type that is written."""
        self._dtype = tokens.dtype.newbyteorder("<").str
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._documents.write((np.cumsum(lengths) + self.tokens).astype("<u8").tobytes())
        self.tokens += len(tokens)
        self._number += len(lengths)
        self._text_bytes += text_bytes
        if self._counted is not None and counted is not None:
            flags = np.concatenate([self._left, counted.astype(bool)])
            whole = len(flags) // 8 * 8
            self._counted.write(np.packbits(flags[:whole], bitorder="little").tobytes())
            self._left = flags[whole:]

    def finish(self, sequence_length: int | None, token_bytes: np.ndarray | None) -> dict[str, Any]:
        """Write what needs all documents; return what tokens.json says of the split."""
        files = {"bin": self._tokens.told(), "documents": self._documents.told()}
        if self._counted is not None:
            self._counted.write(np.packbits(self._left, bitorder="little").tobytes())
            files["counted"] = self._counted.told()
        entry: dict[str, Any] = {"tokens": self.tokens, "documents": self._number, "bytes": self._text_bytes}
        if token_bytes is not None:
            entry["token_bytes"] = self._sum(token_bytes)
        if sequence_length is not None:
            entry |= self._pack(sequence_length, files)
        return {**entry, "files": {f"{self._name}.{ending}": file for ending, file in files.items()}}

    def _mapped(self, ending: str, kind: str) -> np.ndarray:
        return np.asarray(np.memmap(self._folder / f"{self._name}.{ending}", kind, mode="r"))

    def _sum(self, token_bytes: np.ndarray) -> int:
        tokens, step = self._mapped("bin", self._dtype), 1 << 22
        table = token_bytes.astype(np.int64)
        return sum(int(table.take(tokens[at : at + step]).sum()) for at in range(0, len(tokens), step))

    def _pack(self, sequence_length: int, files: dict[str, Any]) -> dict[str, int]:
        spans, rows = packed(self._mapped("documents", "<u8").astype(np.int64), sequence_length)
        targets = spans[:, 1] - 1
        if self._counted is not None:
            bits = self._mapped("counted", "u1")
            targets = np.concatenate([_counted_in(bits, spans[at : at + _PIECES]) for at in range(0, len(spans), _PIECES)])
        counts = np.add.reduceat(targets, rows[:-1])
        for ending, array in (("pieces", spans.astype("<i8")), ("rows", rows.astype("<i8")), ("counts", counts.astype("<i4"))):
            file = self._file(ending)
            file.write(array.tobytes())
            files[ending] = file.told()
        return {"rows": len(rows) - 1, "pieces": len(spans)}


def _counted_in(bits: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return how many tokens but the first count in each span, int64 [P]."""
    return np.array(
        [
            int(np.unpackbits(bits[begin // 8 : -(-end // 8)], bitorder="little")[begin % 8 :][: end - begin].sum())
            for begin, end in zip((spans[:, 0] + 1).tolist(), spans.sum(1).tolist(), strict=True)
        ],
        np.int64,
    )
