"""`samerun data inspect` for tokens: numbers, lengths, and rows as text with the targets marked."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app import tasks
from app.errors import DataError
from app.recipe import recipe_file
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Tokenizer, Transformers, open_tokenizer

_ROW_TOKENS = 256
_QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "max": 1.0}
_GREEN, _DIM, _USUAL = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def describe(source: str, overrides: Sequence[str], options: argparse.Namespace, *, colored: bool) -> str:
    """Return a description of a token folder, or of the tokens that a recipe trains on. Raises RecipeError and DataError.

    `options`: split, rows (how many, evenly spaced), row (this one instead), sequence_length, and all (verify all checksums).
    """
    rows, folder = _opened(source, overrides, options.sequence_length)
    if folder is None:
        lines = [f"{source}: tokens of {_named(rows['train'].facts['tokenizer'])}"]
    else:
        if options.all:
            store.check(folder)
        about = store.about(folder)
        lines = [f"{folder}: tokens of {_named(about['tokenizer'])}", *store.table(about)]
        lines += [f"{folder}: the checksums of all files are correct"] if options.all else []
    lines += ["", *_lengths(rows)]
    if options.split not in rows:
        raise DataError(f"{source} has no split {options.split}; it has {', '.join(rows)}")
    shown = rows[options.split]
    about, size = shown.facts["tokenizer"], len(shown)
    if folder is not None and about["kind"] != "bytes":
        tokenizer = open_tokenizer(str(folder / store.TOKENIZER))
    else:
        tokenizer = open_tokenizer(about["name"], about.get("revision"))
    numbers = np.unique(np.linspace(0, size - 1, min(options.rows, size)).astype(np.int64)).tolist()
    if options.row is not None:
        numbers = [options.row]
        if options.row >= size:
            raise DataError(f"--row {options.row}: the split {options.split} has the rows 0..{size - 1}")
    for number in numbers:
        lines += ["", *_row(shown, number, tokenizer, options.split, colored=colored)]
    return "\n".join(lines) + "\n"


def _opened(source: str, overrides: Sequence[str], length: int | None) -> tuple[dict[str, Rows], Path | None]:
    """Return the rows of each split that exists, and the token folder if they are from one."""
    opened: dict[str, tuple[store.Tokens, int | None]]
    folder: Path | None
    if ((folder := Path(source).expanduser()) / store.ABOUT).exists():
        length = None if store.about(folder)["packed"] else length or _ROW_TOKENS
        opened = {split: (found, length) for split in store.SPLITS if (found := store.open_split(folder, split)) is not None}
    else:
        recipe = recipe_file.load(source, overrides).recipe
        task, path = tasks.of(recipe), recipe.sections.data.path
        samples: dict[str, Any] = {split: task.samples(split) for split in store.SPLITS}
        opened = {split: (it.split, length or it.sequence_length) for split, it in samples.items() if it is not None}
        folder = Path(path).expanduser() if path and (Path(path).expanduser() / store.ABOUT).exists() else None
    rows = {split: Rows(it, size, document_masks=it.documents is not None) for split, (it, size) in opened.items()}
    return rows, folder


def _named(about: Any) -> str:
    at = f" at {about['revision']}" if about.get("revision") else ""
    return f"{about.get('name') or about.get('kind')}{at} (vocabulary of {about['vocab_size']:,})"


def _lengths(splits: dict[str, Rows]) -> list[str]:
    """Return a table of the lengths of documents, and of the targets in packed rows."""
    table = [["", *_QUANTILES, "mean"]]
    for split, rows in splits.items():
        if rows.split.documents is not None and len(rows.split.documents) > 1:
            table.append([f"tokens of a document, {split}", *_spread(np.diff(rows.split.documents.astype(np.int64)))])
        if rows.split.counts is not None:
            table.append([f"targets of a row, {split}", *_spread(rows.split.counts)])
    return store.in_columns(table) if len(table) > 1 else []


def _spread(numbers: np.ndarray) -> list[str]:
    quantiles = np.quantile(numbers, list(_QUANTILES.values()), method="nearest")
    return [*(f"{int(number):,}" for number in quantiles), f"{float(np.mean(numbers)):,.1f}"]


def _row(rows: Rows, number: int, tokenizer: Tokenizer, split: str, *, colored: bool) -> Iterator[str]:
    """Yield a row as lines, each document under a heading."""
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
        f"=== row {number:,} of {split}: {size:,} tokens, {int(counted.sum()):,} count as targets, "
        f"{len(begins) - 1} document{'s' if len(begins) > 2 else ''}{room} ==="
    )
    for place, (begin, end) in enumerate(itertools.pairwise(begins)):
        if len(begins) > 2:
            count = int(counted[begin:end].sum())
            yield f"--- document {place + 1} of {len(begins) - 1}: {end - begin:,} tokens, {count:,} count ---"
        marks = rows.split.counted is not None
        yield _text(tokens[begin:end], counted[begin:end], tokenizer, marks=marks, colored=colored)


def _filled(rows: Rows, number: int) -> int:
    """Return how many tokens of a row are no padding."""
    packed, length = rows.split.packed, rows.sequence_length
    if packed is None:
        return min(length + 1, len(rows.split.tokens) - number * length)
    return int(packed.spans[packed.rows[number] : packed.rows[number + 1], 1].sum())


def _text(tokens: np.ndarray, counted: np.ndarray, tokenizer: Tokenizer, *, marks: bool, colored: bool) -> str:
    """Return tokens as text. What counts is green, or stands in {+ +}; both only where some is not to count."""
    if not marks:
        return _decoded(tokens, tokenizer)
    edges = [0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(tokens)]
    parts = []
    for begin, end in itertools.pairwise(edges):
        text = _decoded(tokens[begin:end], tokenizer)
        if colored:
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
