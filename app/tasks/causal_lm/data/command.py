"""`samerun data tokenize|inspect` for texts: make a token folder, and look into one."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app import tasks
from app.environment import host
from app.errors import DataError, UsageError
from app.options import Parser, not_negative, positive, share
from app.recipe import recipe_file
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Tokenizer, Transformers, open_tokenizer

_SHOWN_ROW_TOKENS = 256
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
        length = None if store.about(folder)["packed"] else length or _SHOWN_ROW_TOKENS
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


_SOURCES = (
    "Sources are files, folders, patterns with *, or names of hub data sets. A text file (.txt) is one document, or several "
    "with --document-separator between them. A JSON-lines file (.jsonl, .ndjson, .json) has one object per line. Both may be "
    "compressed (.gz, .bz2, .xz, .zst). Parquet, CSV and Arrow files, folders from save_to_disk, and anything else that the "
    "datasets library opens have one document per row. Documents keep the order of the sources. A command that was killed "
    "resumes from its finished parts."
)
_ROW_TOKENS = 1024


def main(argv: Sequence[str]) -> int:
    """Run `samerun data tokenize` or `inspect` with these arguments and return its exit code. Raises SamerunError."""
    return {"tokenize": _tokenize, "inspect": _inspect}[argv[0]](argv[1:])


def _tokenize(argv: Sequence[str]) -> int:
    options = _tokenize_parser().parse_all(argv)
    _refuse_contradictions(options)
    from app.tasks.causal_lm.data import tokenizing
    from app.tasks.causal_lm.data.tokenizers import open_tokenizer

    is_packed = options.pack or options.prompts
    job = tokenizing.Job(
        tokenizer=open_tokenizer(options.tokenizer, options.tokenizer_revision),
        sources=_sources(options),
        shares=(options.validation or 0.0, options.test or 0.0),
        sequence_length=(options.sequence_length or _ROW_TOKENS) if is_packed else None,
        prompts=options.prompts,
        too_long=options.too_long,
    )
    sys.stdout.write(tokenizing.tokenize(options.out, job, options.workers))
    return 0


def _sources(options: argparse.Namespace) -> dict[str, Any]:
    """Return the texts of each split that has sources of its own."""
    from app.tasks.causal_lm.data import texts
    from app.tasks.causal_lm.data.tokenizing import columns_of

    separator = options.document_separator
    for escape, character in ((r"\n", "\n"), (r"\t", "\t"), (r"\f", "\f"), (r"\0", "\0")):
        separator = separator and separator.replace(escape, character)
    asked = texts.Asked(
        columns=tuple(options.column.split(",")) if options.column else () if options.prompts else ("text",),
        more_columns=("tools", "chat_template_kwargs") if options.prompts else (),
        kind=options.format,
        separator=separator,
        config=options.config,
        revision=options.revision,
        split=options.split,
        skip_unreadable=options.skip_unreadable,
    )
    if not asked.columns:
        asked = replace(asked, columns=columns_of(texts.find(options.sources, asked)))
    found = {"train": texts.find(options.sources, asked)}
    for split in ("validation", "test"):
        sources, name = getattr(options, f"{split}_source"), getattr(options, f"{split}_split")
        if sources or name:
            found[split] = texts.find(sources or options.sources, replace(asked, split=name or asked.split))
    _refuse_for_files(options, {name for texts_of in found.values() for name in texts_of.datasets})
    return found


def _refuse_for_files(options: argparse.Namespace, datasets: set[str]) -> None:
    """Raise UsageError for options of data sets if there are only files."""
    of_hub = any(not Path(name).exists() for name in datasets)
    for name, kind, is_there in (
        ("config", "data sets of the hub", of_hub),
        ("revision", "data sets of the hub", of_hub),
        ("validation_split", "data sets with splits", bool(datasets)),
        ("test_split", "data sets with splits", bool(datasets)),
    ):
        if (value := getattr(options, name)) is not None and not is_there:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {value}: it is for {kind}, and all sources are files; leave it out")


def _refuse_contradictions(options: argparse.Namespace) -> None:
    problems = []
    for split in ("validation", "test"):
        said = [name for name in (split, f"{split}_source", f"{split}_split") if getattr(options, name)]
        if split in said and len(said) > 1:
            problems.append(
                f"--{split} uses training documents, and --{said[1].replace('_', '-')} uses others: give one of the two"
            )
    if (options.validation or 0) + (options.test or 0) >= 1:
        problems.append("--validation and --test together use all training documents: give smaller shares")
    if options.sequence_length and not (options.pack or options.prompts):
        problems.append(
            "--sequence-length is for packed rows (--pack, --prompts); for other rows set data.sequence_length in the recipe"
        )
    columns = (options.column or "text").split(",")
    if len(columns) > (2 if options.prompts else 1) or not all(columns):
        problems.append(f"--column {options.column}: expected one name, or with --prompts two: PROMPT,COMPLETION")
    if options.too_long != "cut" and not options.prompts:
        problems.append("--too-long is for --prompts: otherwise, longer texts are split into several pieces")
    if problems:
        raise UsageError("; ".join(problems))


def _tokenize_parser() -> Parser:
    parser = Parser(
        prog="samerun data tokenize", description="Tokenize text, or prompts and answers, into a token folder.", epilog=_SOURCES
    )
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="where the text is; see below")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder to create; existing files are never replaced")
    add("--tokenizer", default="bytes", metavar="bytes|FOLDER|NAME",
        help="bytes, a folder or tokenizer.json, or a hub name (default: bytes)")  # fmt: skip
    add("--tokenizer-revision", metavar="COMMIT", help="commit, branch or tag of a hub tokenizer")
    add("--column", metavar="NAME", help="column with the text (default: text); with --prompts the column with the messages, "
        "or PROMPT,COMPLETION (default: whichever usual names are there)")  # fmt: skip
    add("--format", choices=("text", "jsonl", "parquet"), help="format of all files, whatever their endings")
    add("--document-separator", metavar="TEXT", help=r"separates the documents of a text file, such as '\n\n'")
    add("--config", metavar="NAME", help="configuration of a hub data set")
    add("--revision", metavar="COMMIT", help="commit, branch or tag of a hub data set")
    add("--split", default="train", metavar="NAME", help="split of a data set to train on (default: train)")
    for split in ("validation", "test"):
        add(f"--{split}", type=share, metavar="SHARE",
            help=f"share of the training documents to use as the {split} split, such as 0.01")  # fmt: skip
        add(f"--{split}-source", nargs="+", action="extend", metavar="SOURCE", help=f"sources of the {split} split instead")
        add(f"--{split}-split", metavar="NAME", help=f"split of a data set to use for {split}")
    add("--pack", action="store_true", help="pack whole documents into rows (default: one continuous stream of tokens)")
    add("--sequence-length", type=positive, metavar="TOKENS", help=f"target tokens per packed row (default: {_ROW_TOKENS})")
    add("--prompts", action="store_true", help="rows are prompts with answers, or conversations; only answers are targets")
    add("--too-long", choices=("cut", "leave-out"), default="cut", help="for examples longer than a row (default: cut)")
    add("--skip-unreadable", action="store_true", help="skip and count unreadable documents (default: the first is an error)")
    count = host.usable(1)
    add("--workers", type=positive, default=count, metavar="N", help=f"processes (default: {count}, the CPU cores here); the "
        "result is the same with any number")  # fmt: skip
    return parser


def _inspect(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="samerun data inspect", description="Show what a token folder contains: its splits, lengths and rows as text."
    )
    add = parser.add_argument
    what = "FOLDER|--recipe RECIPE [key=value ...]"
    add("words", nargs="+", metavar=what, help="a token folder, or a recipe that trains on one")
    add("--split", default="train", choices=("train", "validation", "test"), help="split to show rows of (default: train)")
    add("--rows", type=not_negative, default=3, metavar="N", help="number of rows to show, evenly spaced (default: 3)")
    add("--row", type=not_negative, metavar="NUMBER", help="show this row instead")
    add("--sequence-length", type=positive, metavar="TOKENS", help="tokens per row of a folder without packed rows "
        "(default: 256)")  # fmt: skip
    add("--all", action="store_true", help="read every file of a token folder and verify its checksum")
    options = parser.parse_all(argv)

    overrides = [word for word in options.words if "=" in word and not Path(word).exists()]
    paths = [word for word in options.words if word not in overrides]
    if len(paths) != 1:
        raise UsageError(f"{' and '.join(paths) or 'nothing'} given: give one token folder or one recipe")
    sys.stdout.write(describe(paths[0], overrides, options, colored=sys.stdout.isatty()))
    return 0
