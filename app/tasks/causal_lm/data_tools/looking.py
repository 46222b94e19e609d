"""What `samerun data inspect` shows of tokens: numbers, lengths, and rows as text with what counts marked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app import tasks
from app.errors import DataError
from app.recipe import recipe_file
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Tokenizer, Transformers, open_tokenizer
from app.tasks.causal_lm.data_tools.summary import SPLITS, in_columns, table_of

_ROW_TOKENS = 256
_QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "max": 1.0}
_GREEN, _DIM, _USUAL = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Wanted:
    """What of a split is shown."""

    split: str = "train"
    rows: int = 3
    """So many, evenly over the split."""
    row: int | None = None
    """This one instead."""
    sequence_length: int | None = None
    """Of rows that are not packed; None: what the recipe says, or 256."""
    everything: bool = False
    """Whether all files are read and compared with what was written."""
    coloured: bool = False


def look(what: str, overrides: Sequence[str], wanted: Wanted) -> str:
    """Return what there is to see of a token folder, or of what a recipe trains on. Raises RecipeError and DataError."""
    rows, folder = _opened(what, overrides, wanted)
    there = {split: found for split, found in rows.items() if found is not None}
    lines = []
    if folder is not None:
        if wanted.everything:
            store.check(folder)
        lines += [f"{folder}: tokens of {_named(store.about(folder)['tokenizer'])}", *table_of(store.about(folder))]
        lines += [f"{folder}: the checksums of all files are correct"] if wanted.everything else []
    else:
        lines.append(f"{what}: tokens of {_named(there['train'].facts['tokenizer'])}")
    lines += ["", *_lengths(there)]
    if wanted.split not in there:
        raise DataError(f"{what} has no split {wanted.split}; it has {', '.join(there)}")
    shown = there[wanted.split]
    tokenizer = _tokenizer_of(shown.facts["tokenizer"], folder)
    for row in _numbers(len(shown), wanted):
        lines += ["", *_row(shown, row, tokenizer, wanted)]
    return "\n".join(lines) + "\n"


def _opened(what: str, overrides: Sequence[str], wanted: Wanted) -> tuple[dict[str, Rows | None], Path | None]:
    """Return the rows of each split, and the token folder if they are from one."""
    folder = Path(what).expanduser()
    if (folder / store.ABOUT).exists():
        length = None if store.about(folder)["packed"] else wanted.sequence_length or _ROW_TOKENS
        splits = {split: store.open_split(folder, split) for split in SPLITS}
        return {split: None if found is None else _rows(found, length) for split, found in splits.items()}, folder
    recipe = recipe_file.load(what, overrides).recipe
    task, path = tasks.of(recipe), recipe.sections.data.path
    opened: dict[str, Any] = {split: task.samples(split) for split in SPLITS}
    rows = {
        split: None if found is None else _rows(found.split, wanted.sequence_length or found.sequence_length)
        for split, found in opened.items()
    }
    told = Path(path).expanduser() if path else None
    return rows, told if told is not None and (told / store.ABOUT).exists() else None


def _rows(split: store.Tokens, length: int | None) -> Rows:
    return Rows(split, length, document_masks=split.documents is not None)


def _named(about: Any) -> str:
    at = f" at {about['revision']}" if about.get("revision") else ""
    return f"{about.get('name') or about.get('kind')}{at} (vocabulary of {about['vocab_size']:,})"


def _tokenizer_of(about: Any, folder: Path | None) -> Tokenizer:
    """Return what rows are shown with: that of the folder, which has a copy of it."""
    if folder is not None and about["kind"] != "bytes":
        return open_tokenizer(str(folder / store.TOKENIZER))
    return open_tokenizer(about["name"], about.get("revision"))


def _lengths(there: dict[str, Rows]) -> list[str]:
    """Return how long documents are, and how full packed rows."""
    table = [["", *_QUANTILES, "mean"]]
    for split, rows in there.items():
        if rows.split.documents is not None and len(rows.split.documents) > 1:
            table.append([f"tokens of a document, {split}", *_spread(np.diff(rows.split.documents.astype(np.int64)))])
        if rows.split.counts is not None:
            table.append([f"targets of a row, {split}", *_spread(rows.split.counts)])
    return in_columns(table) if len(table) > 1 else []


def _spread(numbers: np.ndarray) -> list[str]:
    quantiles = np.quantile(numbers, list(_QUANTILES.values()), method="nearest")
    return [*(f"{int(number):,}" for number in quantiles), f"{float(np.mean(numbers)):,.1f}"]


def _numbers(size: int, wanted: Wanted) -> list[int]:
    if wanted.row is None:
        return [int(place) for place in np.unique(np.linspace(0, size - 1, min(wanted.rows, size)).astype(np.int64))]
    if wanted.row >= size:
        raise DataError(f"--row {wanted.row}: the split {wanted.split} has the rows 0..{size - 1}")
    return [wanted.row]


def _row(rows: Rows, number: int, tokenizer: Tokenizer, wanted: Wanted) -> Iterator[str]:
    """Yield a row as lines: each document under a line that says what it is."""
    fields = {name: field[0].numpy() for name, field in rows.fetch(np.array([number]), None).items()}
    size = _filled(rows, number)
    tokens = fields["tokens"][:size]
    targets = fields["counted"] if "counted" in fields else np.ones(rows.sequence_length, bool)
    counted = np.concatenate([[False], targets])[:size]  # the first is only seen
    of_document = fields.get("documents", np.zeros(rows.sequence_length, np.int32))
    of_document = np.concatenate([of_document, of_document[-1:]])[:size]
    begins = [0, *(np.flatnonzero(np.diff(of_document)) + 1).tolist(), size]
    room = f", {rows.sequence_length + 1 - size:,} unused" if size <= rows.sequence_length else ""
    yield (
        f"=== row {number:,} of {wanted.split}: {size:,} tokens, {int(counted.sum()):,} count as targets, "
        f"{len(begins) - 1} document{'s' if len(begins) > 2 else ''}{room} ==="
    )
    for place, (begin, end) in enumerate(itertools.pairwise(begins)):
        if len(begins) > 2:
            count = int(counted[begin:end].sum())
            yield f"--- document {place + 1} of {len(begins) - 1}: {end - begin:,} tokens, {count:,} count ---"
        marks = rows.split.counted is not None
        yield _text(tokens[begin:end], counted[begin:end], tokenizer, marks=marks, coloured=wanted.coloured)


def _filled(rows: Rows, number: int) -> int:
    """Return how many tokens of a row are no padding."""
    packed, length = rows.split.packed, rows.sequence_length
    if packed is None:
        return min(length + 1, len(rows.split.tokens) - number * length)
    return int(packed.spans[packed.rows[number] : packed.rows[number + 1], 1].sum())


def _text(tokens: np.ndarray, counted: np.ndarray, tokenizer: Tokenizer, *, marks: bool, coloured: bool) -> str:
    """Return tokens as text. What counts is green, or stands in {+ +}; both only where some is not to count."""
    if not marks:
        return _decoded(tokens, tokenizer)
    edges = [0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(tokens)]
    parts = []
    for begin, end in itertools.pairwise(edges):
        text = _decoded(tokens[begin:end], tokenizer)
        if coloured:
            parts.append(f"{_GREEN if counted[begin] else _DIM}{text}{_USUAL}")
        else:
            parts.append("{+" + text + "+}" if counted[begin] else text)
    return "".join(parts)


def _decoded(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text with special tokens in it, and without what would move a terminal's cursor."""
    if isinstance(tokenizer, Transformers):
        text = tokenizer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    else:
        ends = np.flatnonzero(tokens == tokenizer.about["eos_id"])
        text = END_OF_TEXT.join(tokenizer.decode(part.tolist()) for part in np.split(tokens, ends))
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
