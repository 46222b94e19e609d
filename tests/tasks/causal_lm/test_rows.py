"""Rows of tokens against a plain computation of the same: every target once, counts and bytes as they are fetched."""

from __future__ import annotations

import tempfile
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import DataError
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.store import Tokens, embedded_documents, open_embedded, open_split
from app.tasks.causal_lm.data.token_writer import writing

VOCABULARY = 40
TABLE = np.arange(VOCABULARY) % 5  # bytes that each token stands for


def written(folder: Path, texts: list[list[int]], counted: list[list[bool]] | None, packed: int | None) -> Tokens:
    """What was appended in two blocks and opened again."""
    about = {"kind": "test", "vocab_size": VOCABULARY, "digest": "none"}
    with writing(folder, about, {}, token_bytes=TABLE, sequence_length=packed, answers=counted is not None) as writer:
        for part in (slice(0, 1), slice(1, None)):
            flags = None if counted is None else np.array([*chain.from_iterable(counted[part])], bool)
            lengths = np.array([len(text) for text in texts[part]], int)
            writer.append("train", np.array([*chain.from_iterable(texts[part])], int), lengths, counted=flags, text_bytes=1)
    split = open_split(folder, "train")
    assert split is not None
    return split


def fetched(rows: Rows, order: list[int]) -> list[dict[str, Any]]:
    """Each row in the order of its index, out of one batch in this order; what `count` returns is checked."""
    indices = np.array(order)
    batch = {name: field.numpy() for name, field in rows.fetch(indices, None).items()}
    everything = np.ones((len(indices), rows.sequence_length), bool)
    assert rows.count(indices).tolist() == batch.get("counted", everything).sum(1).tolist()
    return [{name: field[at] for name, field in batch.items()} for at in np.argsort(indices)]


texts = st.lists(
    st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), min_size=1, max_size=23), min_size=1, max_size=12
).filter(lambda found: sum(map(len, found)) > 1)


@settings(deadline=None, max_examples=120)
@given(data=st.data(), found=texts, length=st.integers(1, 12), masked=st.booleans(), packs=st.booleans())
def test_rows_have_every_target_once(
    data: st.DataObject, found: list[list[tuple[int, bool]]], length: int, masked: bool, packs: bool
) -> None:
    """Concatenated, every token but the first; packed, every token but the first of each document, and no document is cut."""
    documents, training = packs or data.draw(st.booleans(), label="documents"), data.draw(st.booleans(), label="training")
    stream = [token for text in found for token, _ in text]
    flags = [flag or not masked for text in found for _, flag in text]
    number = [document for document, text in enumerate(found) for _ in text]
    with tempfile.TemporaryDirectory() as folder:
        answers = [[flag for _, flag in text] for text in found] if masked else None
        tokens = [[token for token, _ in text] for text in found]
        split = written(Path(folder, "out"), tokens, answers, length if packs else None)
        rows = Rows(split, None if packs else length, document_masks=documents, training=training)
        got = fetched(rows, data.draw(st.permutations(range(len(rows)))))
    starts = np.cumsum([0, *map(len, found)]).tolist()
    if split.packed is not None:
        spans, bounds = split.packed.spans.tolist(), split.packed.rows.tolist()
        # Whole documents, and of a long one pieces that continue from the last token of the piece before.
        assert sorted(map(tuple, spans)) == sorted(
            (start + at, min(len(text) - at, length + 1))
            for start, text in zip(starts, found, strict=False)
            for at in range(0, max(len(text) - 1, 1), length)
        )
        pieces_of, left_out = [spans[first:end] for first, end in pairwise(bounds)], 0
    else:
        whole, rest = divmod(len(stream) - 1, length)
        left_out = rest if training and whole else 0
        pieces_of = [[(at, min(length + 1, len(stream) - at))] for at in range(0, len(stream) - 1 - left_out, length)]
    assert rows.dropped_targets == left_out
    targets: list[int] = []
    for row, pieces in zip(got, pieces_of, strict=True):
        places = [start + at for start, size in pieces for at in range(size)]
        counted = [at > 0 and flags[start + at] for start, size in pieces for at in range(size)]
        own = [place for place, counts in zip(places, counted, strict=True) if counts]
        targets += own
        padding = length + 1 - len(places)
        assert padding >= 0
        assert row["tokens"].tolist() == [*(stream[place] for place in places), *[0] * padding]
        assert row.get("counted", np.ones(length, bool)).tolist() == [*counted, *[False] * padding][1:]
        assert row["bytes"] == sum(int(TABLE[stream[place]]) for place in own)
        assert ("documents" in row) == documents
        if documents:
            expected = [*(number[place] for place in places), *[-1] * padding][:-1]
            assert np.array_equal(np.diff(row["documents"]) != 0, np.diff(expected) != 0)
    without = starts if packs else [0]
    assert sorted(targets) == [at for at in range(len(stream) - left_out) if at not in without and flags[at]]


def test_the_embedded_text_is_all_there() -> None:
    found = embedded_documents()
    for split, number in (("train", 125), ("validation", 7), ("test", 6)):
        rows = Rows(open_embedded(split), 256, document_masks=True)
        every = rows.fetch(np.arange(len(rows)), None)
        assert len(found[split]) == number
        size = sum(map(len, found[split]))
        assert int(every["bytes"].sum()) == size - 1, "the first byte of all is no target"
        assert int(rows.count(np.arange(len(rows))).sum()) == size + number - 1
    assert found["train"][3].startswith(b"CHAPTER 2. The Carpet-Bag.")


def test_rows_that_are_impossible_are_refused(tmp_path: Path) -> None:
    packed = written(tmp_path / "packed", [[1, 2], [3, 4]], None, 4)
    damaged = Tokens("train", np.array([1, 2**31 + 5, 3], np.uint32), 100_000, "", {}, np.array([0, 3], np.uint64))
    with pytest.raises(DataError, match=r"packed for 4; set data\.sequence_length=null"):
        Rows(packed, 8)
    with pytest.raises(DataError, match="1 tokens"):
        Rows(Tokens("train", np.array([1], np.uint16), 39, "", {}, np.array([0, 1], np.uint64)), 4)
    with pytest.raises(DataError, match="row 0 of train has the token 2147483653, but the vocabulary has 100000"):
        Rows(damaged, 2).fetch(np.array([0]), None)
