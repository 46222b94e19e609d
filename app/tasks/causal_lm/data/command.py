"""`samerun data tokenize|inspect` for texts: make a token folder, and show what one contains."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from app import tasks
from app.environment import host
from app.errors import DataError, UsageError, printable
from app.files import text_files
from app.options import Parser, names, not_negative, positive, share
from app.recipe import recipe_file
from app.tasks.causal_lm.data import store, texts
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.tokenizers import Tokenizer, open_tokenizer

_SHOWN_ROW_TOKENS, _SHOWN_ROWS = 256, 3
_PACKED_ROW_TOKENS = 1024
_QUANTILES = {"min": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "max": 1.0}
_SOURCES = (
    "Sources are files, folders, patterns with *, or names of hub data sets. A text file (.txt) is one document, or several "
    "with --document-separator between them. A JSON-lines file (.jsonl, .ndjson, .json) has one object per line. Both may be "
    "compressed (.gz, .bz2, .xz, .zst). Parquet, CSV and Arrow files, folders from save_to_disk, and anything else that the "
    "datasets library opens have one document per row. Documents keep the order of the sources."
)


def main(argv: Sequence[str]) -> int:
    """Run `samerun data tokenize` or `inspect` with these arguments and return its exit code. Raises SamerunError."""
    report = {"tokenize": _tokenize, "inspect": _inspect}[argv[0]](argv[1:])
    sys.stdout.write(report)
    return 0


def _tokenize(argv: Sequence[str]) -> str:
    options = _tokenize_parser().parse_all(argv)
    if options.sequence_length and not (options.pack or options.prompts):
        raise UsageError("--sequence-length is for packed rows (--pack, --prompts): else set data.sequence_length in a recipe")
    from app.tasks.causal_lm.data import token_writer

    source_options, sources = _sources(options)
    return token_writer.tokenize(
        options.out,
        open_tokenizer(options.tokenizer, options.tokenizer_revision),
        sources,
        source_options,
        sequence_length=(options.sequence_length or _PACKED_ROW_TOKENS) if options.pack or options.prompts else None,
        workers=options.workers,
    )


def _sources(options: argparse.Namespace) -> tuple[texts.SourceOptions, Mapping[str, texts.Texts]]:
    """Return how the sources are read, and the texts of each split that has sources."""
    separator = options.document_separator
    for escape, character in ((r"\n", "\n"), (r"\t", "\t"), (r"\f", "\f"), (r"\0", "\0")):
        separator = separator and separator.replace(escape, character)
    columns = names(options.column or "") if options.prompts else [options.column or "text"]
    source_options = texts.SourceOptions(
        columns=tuple(columns),
        kind=options.format,
        separator=separator,
        shares={"validation": options.validation or 0.0, "test": options.test or 0.0},
        **{name: getattr(options, name) for name in ("prompts", "skip_unreadable", "config", "revision", "split")},
    )
    found = {"train": texts.find(options.sources, source_options)}
    for split in ("validation", "test"):
        sources, name = getattr(options, f"{split}_source"), getattr(options, f"{split}_split")
        if sources or name:
            if getattr(options, split):
                raise UsageError(f"--{split} uses training documents, and --{split}-source or --{split}-split others: give one")
            found[split] = texts.find(sources or options.sources, replace(source_options, split=name or options.split))
    return source_options, found


def _tokenize_parser() -> Parser:
    parser = Parser("data tokenize", "Tokenize text, or prompts and answers, into a token folder.", epilog=_SOURCES)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="where the text is; see below")
    add("--out", type=Path, required=True, metavar="PATH", help="folder to create; existing files are never replaced")
    add("--tokenizer", default="bytes", metavar="bytes|NAME|PATH", help="bytes, a folder, or a hub name (default: bytes)")
    add("--tokenizer-revision", metavar="COMMIT", help="commit, branch or tag of a hub tokenizer")
    add("--column", metavar="NAME", help="column with the text (default: text); with --prompts the column with the messages, "
        "or PROMPT,COMPLETION (default: whichever usual names are there)")  # fmt: skip
    add("--format", choices=("text", "jsonl", "parquet"), help="format of all files, whatever their endings")
    add("--document-separator", metavar="TEXT", help=r"separates the documents of a text file, such as '\n\n'")
    add("--config", metavar="NAME", help="configuration of a hub data set")
    add("--revision", metavar="COMMIT", help="commit, branch or tag of a hub data set")
    add("--split", metavar="NAME", help="split of a data set to train on (default: train)")
    for split in ("validation", "test"):
        add(f"--{split}", type=share, metavar="SHARE",
            help=f"share of the training documents to use as the {split} split, such as 0.01")  # fmt: skip
        add(f"--{split}-source", nargs="+", action="extend", metavar="SOURCE", help=f"sources of the {split} split instead")
        add(f"--{split}-split", metavar="NAME", help=f"split of a data set to use for {split}")
    add("--pack", action="store_true", help="pack whole documents into rows (default: one continuous stream of tokens)")
    add("--sequence-length", type=positive, metavar="TOKENS",
        help=f"target tokens per packed row (default: {_PACKED_ROW_TOKENS})")  # fmt: skip
    add("--prompts", action="store_true", help="rows are prompts with answers, or conversations; only answers are targets")
    add("--skip-unreadable", action="store_true", help="skip and count unreadable rows (default: the first is an error)")
    count = host.usable(1)
    add("--workers", type=positive, default=count, metavar="N", help=f"processes (default: {count}, the CPU cores here); the "
        "result is the same with any number")  # fmt: skip
    return parser


def _inspect(argv: Sequence[str]) -> str:
    parser = Parser("data inspect", "Show what a token folder contains: its splits, lengths and rows as text.")  # fmt: skip
    add = parser.add_argument
    add("words", nargs="+", metavar="RECIPE|PATH", help="recipe (also as --recipe NAME) that trains on a token folder, or the "
        "folder; and recipe values, key=value")  # fmt: skip
    add("--split", default="train", choices=store.SPLITS, help="split to show rows of (default: train)")
    add("--row", type=not_negative, metavar="N", help=f"row to show (default: {_SHOWN_ROWS} rows, evenly spaced)")
    add("--all", action="store_true", help="read every file of a token folder and verify its checksum")
    options = parser.parse_all(argv)
    overrides = [word for word in options.words if "=" in word and not Path(word).exists()]
    sources = [word for word in options.words if word not in overrides]
    if len(sources) != 1:
        raise UsageError(f"{' and '.join(sources) or 'nothing'} given: give one token folder or one recipe")
    if (Path(sources[0]).expanduser() / store.ABOUT).exists():
        return _report(sources[0], overrides, options)
    data = recipe_file.load(sources[0], overrides).recipe.sections.data
    if data.sources is None:
        return _report(sources[0], overrides, options)
    reports = []
    for (name, path), source in zip(data.folders.items(), data.sources, strict=True):
        alone = recipe_file.replaced(overrides, ["data.sources=null", "data.phases=null", f"data.path={path}"])
        reports.append(f"source {name}, weight {source['weight']:g}: {path}\n{_report(sources[0], alone, options)}")
    return "\n".join(reports)


def _report(source: str, overrides: Sequence[str], options: argparse.Namespace) -> str:
    """Return statistics of one text, and rows of it."""
    rows, data_path = _opened(source, overrides)
    if options.split not in rows:
        raise DataError(f"{source} has no split {options.split}; it has {', '.join(rows)}")
    if options.all:
        if data_path is None:
            raise UsageError("--all is for token folders, and this text comes with the package: leave it out")
        store.check(Path(data_path))
    tokenizer = store.stored_tokenizer(data_path)
    if tokenizer is None:
        raise DataError(f"{data_path} does not contain its tokenizer, so its rows cannot be shown as text")
    lines = [*_statistics(rows), *(["the checksums of all files are correct"] if options.all else [])]
    shown = rows[options.split]
    numbers = np.unique(np.linspace(0, len(shown) - 1, min(_SHOWN_ROWS, len(shown))).astype(np.int64)).tolist()
    if options.row is not None:
        numbers = [options.row]
        if options.row >= len(shown):
            raise DataError(f"--row {options.row}: the split {options.split} has the rows 0..{len(shown) - 1}")
    for number in numbers:
        lines += ["", *_row(shown, number, tokenizer, options.split)]
    return "\n".join(lines) + "\n"


def _statistics(splits: Mapping[str, Rows]) -> Iterator[str]:
    about = next(iter(splits.values())).facts["tokenizer"]
    revision = f" at {about['revision']}" if about["revision"] else ""
    yield f"tokens of {about['name']}{revision} (vocabulary of {about['vocab_size']:,})"
    for split, rows in splits.items():
        yield f"{split}: {len(rows.split.tokens):,} tokens, {len(rows):,} rows of {rows.sequence_length}"
        lengths = {"tokens of a document": np.diff(rows.split.documents.astype(np.int64))}
        if rows.split.counts is not None:
            lengths["targets of a row"] = rows.split.counts
        for what, numbers in lengths.items():
            quantiles = np.quantile(numbers, list(_QUANTILES.values()), method="nearest")
            named = ", ".join(f"{name} {int(value):,}" for name, value in zip(_QUANTILES, quantiles, strict=True))
            yield f"{split}: {what}: {named}, mean {float(np.mean(numbers)):,.1f}"


def _opened(source: str, overrides: Sequence[str]) -> tuple[dict[str, Rows], str | None]:
    """Return the rows of each split, and the folder that they are in; None: the package's."""
    folder = Path(source).expanduser()
    opened: dict[str, tuple[store.Tokens | None, int | None]]
    if (folder / store.ABOUT).exists():
        length = None if store.about(folder)["packed"] else _SHOWN_ROW_TOKENS
        opened, data_path = {split: (store.open_split(folder, split), length) for split in store.SPLITS}, str(folder)
    else:
        recipe = recipe_file.load(source, overrides).recipe
        task, data_path = tasks.of(recipe), recipe.sections.data.path
        data_path = data_path and text_files.filled_in("data.path", data_path)
        samples = {split: task.samples(split) for split in store.SPLITS}
        opened = {split: (it.split, it.sequence_length) for split, it in samples.items() if it is not None}
    rows = {name: Rows(tokens, length, document_masks=True) for name, (tokens, length) in opened.items() if tokens is not None}
    return rows, data_path


def _row(rows: Rows, number: int, tokenizer: Tokenizer, split: str) -> Iterator[str]:
    """Yield a row as lines, each document under a heading. Where not all tokens count, those that do are in {+ +}."""
    fields = {name: field[0].numpy() for name, field in rows.fetch(np.array([number]), None).items()}
    size, length = rows.num_tokens(number), rows.sequence_length
    tokens = fields["tokens"][:size]
    counted = np.append(False, fields.get("counted", np.ones(length, bool)))[:size]  # the first token is no target
    documents = fields.get("documents", np.zeros(length, np.int32))
    begins = [0, *(np.flatnonzero(np.diff(documents[:size])) + 1).tolist(), size]
    targets = int(counted.sum())
    yield f"=== row {number:,} of {split}: {size:,} tokens, {targets:,} count as targets, documents: {len(begins) - 1} ==="
    for place, (begin, end) in enumerate(itertools.pairwise(begins), 1):
        if len(begins) > 2:
            count = int(counted[begin:end].sum())
            yield f"--- document {place} of {len(begins) - 1}: {end - begin:,} tokens, {count:,} count ---"
        edges = [begin, end]
        if rows.split.counted is not None:
            edges[1:1] = (begin + 1 + np.flatnonzero(np.diff(counted[begin:end]))).tolist()
        text = ""
        for first, last in itertools.pairwise(edges):
            part = tokenizer.decode(tokens[first:last].tolist(), special=True)
            text += "{+" + part + "+}" if rows.split.counted is not None and counted[first] else part
        yield printable(text)
