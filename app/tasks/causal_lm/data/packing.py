"""Which documents share a row: best fit, decided once, when a text is tokenized.

Documents are never cut, unless one is longer than a row. The longest are placed first, each into the row where the least room
is left ("best fit decreasing", as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). Equal lengths are placed
together, as in Krell et al. 2021, which gives the same rows and takes a loop over lengths, not over documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """What each row is made of."""

    spans: np.ndarray
    """int64 [P, 2]: first token and length of each piece, in the order of the rows, and in a row in that of the text."""
    rows: np.ndarray
    """int64 [R + 1]: row r has the pieces rows[r] .. rows[r + 1] - 1."""


def packed(documents: np.ndarray, sequence_length: int) -> Pieces:
    """Return the rows for documents that begin at int64 [D + 1], the last entry being the end of the last.

    A row has at most `sequence_length` + 1 tokens: so many targets, and the token before the first. A longer document is cut
    into pieces that begin with the last token of the piece before: each of its tokens but the first is a target once.
    """
    starts, lengths = documents[:-1], np.diff(documents)
    number = np.maximum(-((1 - lengths) // sequence_length), 1)  # ceil((length - 1) / sequence_length)
    inside = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    begin = inside * sequence_length
    length = np.minimum(np.repeat(lengths, number) - begin, sequence_length + 1)
    row = best_fit(length, sequence_length + 1)
    order = np.argsort(row, kind="stable")
    spans = np.stack([np.repeat(starts, number) + begin, length], 1)[order]
    per_row = np.bincount(row, minlength=0)
    return Pieces(spans, np.concatenate([[0], np.cumsum(per_row)]))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row, int64 [P], of each piece of the given lengths (int64 [P], in 1 .. capacity)."""
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    bounds = np.flatnonzero(np.diff(ordered, prepend=0, append=0)) if len(ordered) else np.empty(0, np.int64)
    room = _Room(capacity)
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        length, those = int(ordered[first]), order[first:end]
        while len(those):
            space, rows, each = room.take(length, len(those))
            taken = min(len(those), len(rows) * each)
            row_of[those[:taken]] = np.repeat(rows, each)[:taken]
            those = those[taken:]
            filled, more = divmod(taken, each)
            room.give(space - each * length, rows[:filled])
            if more:
                room.give(space - more * length, rows[filled : filled + 1])
    return row_of


class _Room:
    """Rows by the number of tokens for which they have room."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._number = capacity, 0
        self._spaces: list[int] = []
        self._rows: dict[int, np.ndarray] = {}

    def take(self, length: int, pieces: int) -> tuple[int, np.ndarray, int]:
        """Return the smallest space for a piece, rows that have it, no more than are needed, and how many pieces go into each.

        A row that has taken a piece and has room for another one has less room than before: it is the best fit again.
        """
        at = bisect_left(self._spaces, length)
        space = self._spaces[at] if at < len(self._spaces) else self._capacity
        each = space // length
        needed = -(-pieces // each)
        if at == len(self._spaces):
            rows = np.arange(self._number, self._number + needed)
            self._number += needed
            return space, rows, each
        rows = self._rows.pop(space)
        del self._spaces[at]
        self.give(space, rows[needed:])
        return space, rows[:needed], each

    def give(self, space: int, rows: np.ndarray) -> None:
        """Keep rows, int64 [n], for shorter pieces."""
        if not space or not len(rows):
            return
        if space in self._rows:
            rows = np.concatenate([self._rows[space], rows])
        else:
            insort(self._spaces, space)
        self._rows[space] = rows
