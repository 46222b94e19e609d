"""Rows of tokens against a plain computation of the same: every target once, counts and bytes as they are fetched."""

from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.data.samples import LooksUp
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
    """Each row in the order of its index, out of one batch in this order; what `count` says is checked."""
    indices = np.array(order)
    batch = {name: field.numpy() for name, field in rows.fetch(indices, None).items()}
    again = {name: np.empty((len(indices), *shape), dtype) for name, (shape, dtype) in rows.layout.items()}
    assert isinstance(rows, LooksUp)
    rows.fetch_into(indices, again)
    for name, field in again.items():
        assert np.array_equal(field, batch[name])
    everything = np.ones((len(indices), rows.sequence_length), bool)
    assert rows.count(indices).tolist() == batch.get("counted", everything).sum(1).tolist()
    back = np.argsort(indices)
    return [{name: field[at] for name, field in batch.items()} for at in back]


texts = st.lists(
    st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), min_size=1, max_size=23), min_size=1, max_size=12
).filter(lambda found: sum(map(len, found)) > 1)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), found=texts, length=st.integers(1, 12), masked=st.booleans())
def test_concatenated_rows_have_every_target_once(
    data: st.DataObject, found: list[list[tuple[int, bool]]], length: int, masked: bool
) -> None:
    documents, training = data.draw(st.booleans(), label="documents"), data.draw(st.booleans(), label="training")
    stream = [token for text in found for token, _ in text]
    flags = [flag or not masked for text in found for _, flag in text]
    number = [document for document, text in enumerate(found) for _ in text]
    with tempfile.TemporaryDirectory() as folder:
        answers = [[flag for _, flag in text] for text in found] if masked else None
        split = written(Path(folder, "out"), [[token for token, _ in text] for text in found], answers, None)
        rows = Rows(split, length, document_masks=documents, training=training)
        got = fetched(rows, data.draw(st.permutations(range(len(rows)))))
    whole = (len(stream) - 1) // length
    left_out = (len(stream) - 1) % length if training and whole else 0
    assert rows.dropped_targets == left_out
    targets: list[int] = []
    for index, row in enumerate(got):
        start = index * length
        expected = stream[start : start + length + 1]
        assert row["tokens"].tolist() == expected + [0] * (length + 1 - len(expected))
        valid = [*flags[start + 1 : start + length + 1], *[False] * length][:length]
        assert row.get("counted", np.ones(length, bool)).tolist() == valid
        targets += [start + 1 + at for at in range(length) if valid[at]]
        assert row["bytes"] == sum(int(TABLE[stream[start + 1 + at]]) for at in range(length) if valid[at])
        if documents:
            own = number[start : start + length]
            padding = [own[-1] + 1] * (length - len(own))
            assert row["documents"].tolist() == [document - own[0] for document in own + padding]
        assert ("documents" in row) == documents
    assert targets == [at for at in range(1, len(stream) - left_out) if flags[at]]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), found=texts, length=st.integers(1, 12), masked=st.booleans())
def test_packed_rows_cut_no_document_and_lose_none(
    data: st.DataObject, found: list[list[tuple[int, bool]]], length: int, masked: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = [[flag for _, flag in text] for text in found] if masked else None
        split = written(Path(folder, "out"), [[token for token, _ in text] for text in found], answers, length)
        rows = Rows(split, None, document_masks=True, training=data.draw(st.booleans()))
        got = fetched(rows, data.draw(st.permutations(range(len(rows)))))
    starts = np.cumsum([0, *map(len, found)]).tolist()
    stream = [pair for text in found for pair in text]
    # Whole documents, and of a long one pieces that go on from the last token of the one before.
    expected = [
        (start + at, min(len(text) - at, length + 1))
        for start, text in zip(starts, found, strict=False)
        for at in range(0, max(len(text) - 1, 1), length)
    ]
    assert split.packed is not None
    spans, bounds = split.packed.spans.tolist(), split.packed.rows.tolist()
    assert sorted(map(tuple, spans)) == sorted(expected)
    targets = []
    for row, first, end in zip(got, bounds[:-1], bounds[1:], strict=True):
        tokens, counted, documents = [], [], []
        for number, (start, size) in enumerate(spans[first:end]):
            piece = stream[start : start + size]
            tokens += [token for token, _ in piece]
            counted += [at > 0 and (flag or not masked) for at, (_, flag) in enumerate(piece)]
            documents += [number] * size
            targets += [start + at for at in range(size) if counted[at - size]]
        padding = length + 1 - len(tokens)
        assert padding >= 0
        assert row["tokens"].tolist() == tokens + [0] * padding
        assert row["counted"].tolist() == (counted + [False] * padding)[1:]
        documents += [end - first] * padding
        assert np.array_equal(np.diff(row["documents"]) != 0, np.diff(documents[:-1]) != 0)
        assert row["bytes"] == sum(int(TABLE[token]) for token, flag in zip(tokens, counted, strict=True) if flag)
    begins = set(starts)
    assert sorted(targets) == [at for at, (_, flag) in enumerate(stream) if at not in begins and (flag or not masked)]


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
    with pytest.raises(DataError, match="packed for 4"):
        Rows(packed, 8)
    with pytest.raises(DataError, match="1 tokens"):
        Rows(Tokens("train", np.array([1], np.uint16), 39, "", {}, np.array([0, 1], np.uint64)), 4)
    with pytest.raises(DataError, match="row 0 of train has the token 2147483653, but the vocabulary has 100000"):
        Rows(damaged, 2).fetch(np.array([0]), None)
