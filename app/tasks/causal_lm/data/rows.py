"""Rows of tokens as samples: S tokens, each with the one that follows as its target.

Concatenated, row i holds tokens i * S .. i * S + S of the split: every token but the first is a target exactly once. The last
row may be short. In an evaluation it is padded, and the padding does not count; in training it is left out (S - 1 targets at
most), unless there is no other row.

Packed, a row holds whole documents (`packing`). The first token of each is no target: nothing of it comes before. So what a
document costs does not depend on its neighbours, if document masks keep them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from app.data.draws import HostDraws
from app.data.samples import Layout
from app.errors import DataError
from app.tasks.causal_lm.data.store import Pieces, Tokens


class Rows:
    """One split as rows. A batch has

    - `tokens`, int32 [B, S + 1]: inputs and, one further, targets;
    - `counted`, bool [B, S], only where not all targets count: whether the target does;
    - `documents`, int32 [B, S], only with document masks: the number of the document of each input within its row;
    - `bytes`, int32 [B], only where they are known: bytes of text of the targets that count.
    """

    workers: ClassVar[bool] = False
    remedy: ClassVar[str] = "copy the token folder to a local disk"

    def __init__(
        self, split: Tokens, sequence_length: int | None, *, document_masks: bool = False, training: bool = False
    ) -> None:
        """Take the rows of a split, each with `sequence_length` targets; None: those that were packed.

        With `document_masks` a batch says which document each token is of; `training` leaves a short last row out. Raises
        DataError if the split has not what is asked for.
        """
        self.split, self.sequence_length = split, _length_of(split, sequence_length)
        self._masks, self._training = document_masks, training
        if document_masks and split.documents is None:
            raise DataError(
                f"data.document_masks=true: {split.where} does not record where its documents begin; set it "
                "to false, or tokenize the texts (samerun data tokenize)"
            )
        if len(split.tokens) < 2:
            raise DataError(f"{split.where} has {len(split.tokens)} tokens; predicting one token needs at least 2")
        self._rows: _Concatenated | _Packed
        if split.packed is None:
            self._rows = _Concatenated(split, self.sequence_length, training=training)
        else:
            self._rows = _Packed(split, self.sequence_length, split.packed)
        self._token_bytes = None if split.token_bytes is None else split.token_bytes.astype(np.int32)

    def __len__(self) -> int:
        return self._rows.size

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(Rows, document_masks=self._masks, training=self._training)
        return made, (self.split, self.sequence_length)

    @property
    def dropped_targets(self) -> int:
        """Targets that training does without: those of a short last row."""
        return self._rows.dropped_targets

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a model must know: its vocabulary, the longest row, and how the text was read."""
        return {
            "vocab_size": self.split.vocab_size,
            "sequence_length": self.sequence_length,
            "tokenizer": dict(self.split.tokenizer),
            "document_masks": self._masks,
        }

    @property
    def fingerprint(self) -> str:
        """That of the tokens, and how they are divided into rows."""
        kind = "packed rows" if self.split.packed is not None else "rows"
        return f"{self.split.fingerprint} in {kind} of {self.sequence_length}{' with document masks' if self._masks else ''}"

    @property
    def layout(self) -> Layout:
        """Shape, without the batch, and type of each field."""
        length = self.sequence_length
        fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {"tokens": ((length + 1,), np.dtype(np.int32))}
        if self._rows.some_count:
            fields["counted"] = (length,), np.dtype(np.bool_)
        if self._masks:
            fields["documents"] = (length,), np.dtype(np.int32)
        if self._token_bytes is not None:
            fields["bytes"] = (), np.dtype(np.int32)
        return fields

    def count(self, indices: np.ndarray) -> np.ndarray:
        """Return how many targets count in each of these rows, int64 [B], without a look at the tokens."""
        return self._rows.count(indices)

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002  nothing is random
        """Return the rows as the class says. Raises DataError for a token that is none of the vocabulary."""
        memory = {name: np.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.layout.items()}
        self.fetch_into(indices, memory)
        return {name: torch.from_numpy(array) for name, array in memory.items()}

    def fetch_into(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        """Write what `fetch` returns into the fields' arrays."""
        self._rows.write(indices, memory)
        tokens = memory["tokens"]
        unsigned = tokens.view(np.uint32)  # of a damaged file of 32 bits, numbers beyond int32 as well
        if int(unsigned.max(initial=0)) >= self.split.vocab_size:
            row = int(indices[(unsigned >= self.split.vocab_size).any(1).argmax()])
            raise DataError(
                f"row {row} of {self.split.where} has the token {unsigned.max()}, but the vocabulary has "
                f"{self.split.vocab_size}: the file is damaged, or belongs to another vocabulary"
            )
        if self._token_bytes is not None:
            of_each = self._token_bytes.take(tokens[:, 1:])
            if "counted" in memory:
                of_each *= memory["counted"]
            np.sum(of_each, axis=1, out=memory["bytes"])


def _length_of(split: Tokens, asked: int | None) -> int:
    stored = split.sequence_length
    if split.packed is not None and stored is not None:
        if asked not in (None, stored):
            raise DataError(
                f"data.sequence_length={asked}: the rows of {split.where} were packed for {stored}; remove "
                "the key, or pack them again (samerun data tokenize)"
            )
        return stored
    assert asked is not None, "set it, because the rows are not packed"
    if asked < 1:
        raise DataError(f"data.sequence_length={asked}: a row needs at least 1 token")
    return asked


class _Concatenated:
    """Rows that follow one another in the split."""

    def __init__(self, split: Tokens, length: int, *, training: bool) -> None:
        self._tokens, self._documents, self._bits, self._length = split.tokens, split.documents, split.counted, length
        self._full, rest = divmod(len(split.tokens) - 1, length)
        padded = bool(rest) and not (training and self._full)
        self.size, self.dropped_targets = self._full + padded, 0 if padded else rest
        self.some_count = padded or self._bits is not None
        item = split.tokens.itemsize
        self._view = as_strided(split.tokens, (self._full, length + 1), (length * item, item), writeable=False)

    def count(self, indices: np.ndarray) -> np.ndarray:
        if self._bits is None:
            left: np.ndarray = len(self._tokens) - 1 - indices.astype(np.int64) * self._length
            return np.asarray(np.minimum(left, self._length))
        counted = np.empty((len(indices), self._length), bool)
        self._write_counted(indices, counted)
        return np.asarray(counted.sum(1, dtype=np.int64))

    def write(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        short = np.flatnonzero(indices == self._full)
        if len(short):
            last = self._tokens[self._full * self._length :]
            memory["tokens"][:] = 0
            memory["tokens"][short, : len(last)] = last
            full = np.flatnonzero(indices != self._full)
            memory["tokens"][full] = self._view[indices[full]]
        else:
            memory["tokens"][:] = self._view[indices]  # not `take`: it would copy the whole split first
        if "counted" in memory:
            self._write_counted(indices, memory["counted"])
        if "documents" in memory and self._documents is not None:
            self._write_documents(indices, memory["documents"], self._documents)

    def _write_counted(self, indices: np.ndarray, counted: np.ndarray) -> None:
        places = (indices.astype(np.int64) * self._length)[:, None] + np.arange(1, self._length + 1)
        if self._bits is None:
            np.less(places, len(self._tokens), out=counted)
        else:
            counted[:] = _bits_at(self._bits, np.minimum(places, len(self._tokens) - 1))
            counted &= places < len(self._tokens)

    def _write_documents(self, indices: np.ndarray, numbers: np.ndarray, documents: np.ndarray) -> None:
        """The end of the last document is in it as well: padding is no part of any."""
        begins = documents.view(np.int64)
        start = indices.astype(np.int64) * self._length
        first, end = begins.searchsorted(start, side="right"), begins.searchsorted(start + self._length, side="left")
        rows = np.repeat(np.arange(len(indices)), end - first)
        numbers[:] = 0
        numbers[rows, begins[_ranges(first, end - first)] - start[rows]] = 1
        np.cumsum(numbers, axis=1, out=numbers)


class _Packed:
    """Rows of whole documents."""

    dropped_targets = 0
    some_count = True

    def __init__(self, split: Tokens, length: int, pieces: Pieces) -> None:
        assert split.counts is not None
        self._tokens, self._bits, self._counts = split.tokens, split.counted, split.counts
        self._pieces, self._length, self.size = pieces, length, len(pieces.rows) - 1

    def count(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(self._counts[indices], np.int64)

    def write(self, indices: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        first = self._pieces.rows[indices]
        per_row = self._pieces.rows[indices + 1] - first
        starts, lengths = self._pieces.spans[_ranges(first, per_row)].T
        row = np.repeat(np.arange(len(indices)), per_row)
        ends = np.cumsum(lengths)
        before = np.concatenate([[0], ends[np.cumsum(per_row) - 1]])  # tokens in the rows before
        width = self._length + 1
        begins = row * width + (ends - lengths - before[row])  # where each piece begins in the batch
        shape, places = (len(indices), width), _ranges(starts, lengths)
        filled = np.arange(width) < np.diff(before)[:, None]

        memory["tokens"][:] = 0
        memory["tokens"][filled] = self._tokens[places]
        if self._bits is not None:
            counted = np.zeros(shape, bool)
            counted[filled] = _bits_at(self._bits, places)
        else:
            counted = filled.copy()
        counted.reshape(-1)[begins] = False
        memory["counted"][:] = counted[:, 1:]
        if "documents" in memory:
            marks = np.zeros(shape, np.int32)
            marks.reshape(-1)[begins] = 1
            short = np.flatnonzero(~filled[:, -1])
            marks[short, np.diff(before)[short]] = 1  # padding is no part of any document
            np.cumsum(marks[:, :-1], axis=1, out=memory["documents"])
            memory["documents"] -= 1


def _ranges(first: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return first[0], first[0] + 1, ... (number[0] of them), first[1], ...: int64 [sum of number]."""
    return np.repeat(first - (np.cumsum(number) - number), number) + np.arange(number.sum())


def _bits_at(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the bits at int64 [...] of uint8 [...], the lowest first, as bool."""
    return np.asarray(bits[places >> 3] >> (places & 7).astype(np.uint8) & 1, bool)
