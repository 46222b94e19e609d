"""Rows of tokens as samples: S tokens, each with the one that follows as its target.

Concatenated, row i holds tokens i * S .. i * S + S of the split: every token but the first is a target exactly once. The last
row may be short. In an evaluation it is padded, and the padding does not count; in training it is left out (S - 1 targets at
most), unless there is no other row.

Packed, a row holds whole documents (`token_writer`). The first token of each is no target: nothing of it comes before. So what
a document costs does not depend on its neighbors, if document masks keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from app.data.draws import HostDraws
from app.errors import DataError
from app.tasks.causal_lm.data.store import Tokens


class Rows:
    """One split as rows. A batch has

    - `tokens`, int32 [B, S + 1]: inputs and, one further, targets;
    - `counted`, bool [B, S], only where not all targets count: whether the target does;
    - `documents`, int32 [B, S], only with document masks: a number of each input's document, another one for its neighbors;
    - `bytes`, int32 [B], only where they are known: bytes of text of the targets that count.
    """

    workers: ClassVar[bool] = False
    is_array: ClassVar[bool] = True

    def __init__(
        self, split: Tokens, sequence_length: int | None, *, document_masks: bool = False, training: bool = False
    ) -> None:
        """Take the rows of a split, each with `sequence_length` targets; None: those that were packed.

        With `document_masks` a batch has the number of each token's document; `training` leaves a short last row out. Raises
        DataError for packed rows of another length, and for a text without a target.
        """
        if split.packed is not None:
            if sequence_length not in (None, split.sequence_length):
                raise DataError(
                    f"data.sequence_length={sequence_length}: the rows of {split.where} were packed for "
                    f"{split.sequence_length}; set data.sequence_length=null, or pack them again (samerun data tokenize)"
                )
            sequence_length = split.sequence_length
        assert sequence_length is not None, "set it, because the rows are not packed"
        if len(split.tokens) < 2:
            raise DataError(f"{split.where} has {len(split.tokens)} tokens; predicting one token needs at least 2")
        self.split, self.sequence_length = split, sequence_length
        self.some_count: bool
        """True if batches have `counted`."""
        self._masks = document_masks
        self.dropped_targets = 0
        """Targets of a short last row, which training leaves out."""
        if split.packed is not None:
            self._size, self.some_count = len(split.packed.rows) - 1, True
        else:
            full, rest = divmod(len(split.tokens) - 1, sequence_length)
            is_padded = bool(rest) and not (training and full)
            self.dropped_targets = 0 if is_padded else rest
            self._size, self.some_count = full + is_padded, is_padded or split.counted is not None
        self._token_bytes = None if split.token_bytes is None else split.token_bytes.astype(np.int32)

    def __len__(self) -> int:
        return self._size

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that a model needs: the vocabulary, the longest row, and how the text was read."""
        return {
            "vocab_size": self.split.vocab_size,
            "sequence_length": self.sequence_length,
            "tokenizer": dict(self.split.tokenizer),
            "document_masks": self._masks,
        }

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens, and how they are divided into rows."""
        kind = "packed rows" if self.split.packed is not None else "rows"
        return f"{self.split.fingerprint} in {kind} of {self.sequence_length}{' with document masks' if self._masks else ''}"

    def count(self, indices: np.ndarray) -> np.ndarray:
        """Return how many targets count in each of these rows, int64 [B], without a look at the tokens."""
        if self.split.counts is not None:
            return np.asarray(self.split.counts[indices], np.int64)
        if self.split.counted is not None:
            return np.asarray(self._counted(self._places(indices)).sum(1, dtype=np.int64))
        left: np.ndarray = len(self.split.tokens) - 1 - indices.astype(np.int64) * self.sequence_length
        return np.asarray(np.minimum(left, self.sequence_length))

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of a row are no padding."""
        return int((self._places(np.array([index])) < len(self.split.tokens)).sum())

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002  nothing is random
        """Return the rows, in the fields listed for the class. Raises DataError for a token outside the vocabulary."""
        places, end = self._places(indices), len(self.split.tokens)
        tokens = self.split.tokens[np.minimum(places, end - 1)].astype(np.int32)
        tokens[places == end] = 0
        unsigned = tokens.view(np.uint32)  # a damaged file of 32 bits may have numbers beyond int32 as well
        if int(unsigned.max(initial=0)) >= self.split.vocab_size:
            row = int(indices[(unsigned >= self.split.vocab_size).any(1).argmax()])
            raise DataError(
                f"row {row} of {self.split.where} has the token {unsigned.max()}, but the vocabulary has "
                f"{self.split.vocab_size}: the file is damaged, or belongs to another vocabulary"
            )
        fields = {"tokens": tokens}
        if self.some_count:
            fields["counted"] = self._counted(places)
        if self._masks:
            numbers = self._documents(places)
            fields["documents"] = (numbers - numbers[:, :1])[:, :-1].astype(np.int32)
        if self._token_bytes is not None:
            sizes = self._token_bytes.take(tokens[:, 1:])
            if self.some_count:
                sizes *= fields["counted"]
            fields["bytes"] = sizes.sum(1, dtype=np.int32)
        return {name: torch.from_numpy(field) for name, field in fields.items()}

    def _places(self, indices: np.ndarray) -> np.ndarray:
        """Return the places in the split of all tokens of rows, int64 [B, S + 1]; padding is at the end of the split."""
        end, width = len(self.split.tokens), self.sequence_length + 1
        if self.split.packed is None:
            first = indices.astype(np.int64) * self.sequence_length
            return np.asarray(np.minimum(first[:, None] + np.arange(width), end))
        spans, rows = self.split.packed
        places = np.full((len(indices), width), end)
        first = rows[indices]
        per_row = rows[indices + 1] - first
        starts, lengths = spans[_ranges(first, per_row)].T
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        sizes = np.diff(bounds[np.concatenate([[0], np.cumsum(per_row)])])
        places[np.arange(width) < sizes[:, None]] = _ranges(starts, lengths)
        return places

    def _documents(self, places: np.ndarray) -> np.ndarray:
        """Return the number of each place's document, from 1; padding is in none of them."""
        return np.asarray(self.split.documents.view(np.int64).searchsorted(places, side="right"))

    def _counted(self, places: np.ndarray) -> np.ndarray:
        """Return which targets count, bool [B, S]."""
        targets = places[:, 1:]
        counted = targets < len(self.split.tokens)
        if (bits := self.split.counted) is not None:
            at = np.minimum(targets, len(self.split.tokens) - 1)
            counted &= (bits[at >> 3] >> (at & 7).astype(np.uint8) & 1).astype(bool)
        if self.split.packed is not None:
            numbers = self._documents(places)
            counted &= numbers[:, 1:] == numbers[:, :-1]
        return np.asarray(counted)


def _ranges(first: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return first[0], first[0] + 1, ... (number[0] of them), first[1], ...: int64 [sum of number]."""
    return np.repeat(first - (np.cumsum(number) - number), number) + np.arange(number.sum())
