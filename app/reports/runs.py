"""`samerun runs [FOLDER...]`: a table of runs, with their states, their scores and what differs between their recipes."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from app.errors import RunFolderError, UsageError, printable
from app.files.text_files import duration
from app.options import Parser
from app.reports.past_run import PastRun, find, flat, last_scores, state_of, value_text, words

Row = dict[str, Any]
_NUMBER = re.compile(r"unknown|[-+]?\d[\d,]*(\.\d*)?(e[-+]?\d+)?( .*|%)?")
"""A number, and what may follow it, such as its unit; or none that is known."""
_BREAK = re.compile(r" |(?<=\.)")
"""A place where a heading can be broken: at a space, and after the section of a recipe key."""


class SafeConsole(Console):
    """A rich console that shows all control characters in texts as escapes; rich itself removes only a few of them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return rich's segments; only those that rich itself has made may command the terminal."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console(width: int = 160) -> SafeConsole:
    """Return a console as wide as the terminal, or `width` characters without one."""
    return SafeConsole(highlight=False, width=None if sys.stdout.isatty() else width)


def print_wrapped(text: str) -> None:
    """Write a text to stdout; a terminal's lines end between words."""
    console().print(text, markup=False, soft_wrap=not sys.stdout.isatty())


def main(argv: list[str]) -> int:
    """Print the table. Raises RunFolderError if there are no runs, and for a column that none has."""
    parser = Parser("runs", "List runs: their states, their scores, and the recipe keys in which they differ.")
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("runs")], metavar="RUN",
                        help="run folder, or a folder of run folders (default: runs)")  # fmt: skip
    parser.add_argument("--sort", metavar="COLUMN", help="sort by this column, smallest first")
    parser.add_argument("--reverse", action="store_true", help="with --sort: largest first")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table", help="output format (default: table)")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    options = parser.parse_all(argv)
    runs = find(options.folders)
    if not runs:
        raise RunFolderError(
            f"there are no runs in {', '.join(map(str, options.folders))}: give run folders, or folders of them."
        )
    rows = rows_of(runs, now=time.time())
    by_heading = {name: key for key in rows[0] for name in (key, _heading(key))}
    if options.sort and options.sort not in by_heading:
        raise UsageError(f"--sort is {options.sort!r}: the columns are {', '.join(rows[0])}")
    if key := by_heading.get(options.sort):  # rows without a value are last
        known = [row for row in rows if row[key] is not None]
        are_numbers = all(isinstance(row[key], (int, float)) for row in known)
        known.sort(key=lambda row: row[key] if are_numbers else str(row[key]), reverse=options.reverse)
        rows = known + [row for row in rows if row[key] is None]
    if options.format == "table":
        keys, losses = ([key for key in rows[0] if it in key] for it in (".", "_loss"))
        optional = [*keys[:2:-1], "of", "step", *map(_heading, reversed(losses)), "started", *keys[2:0:-1], "task", "duration"]
        write([{_heading(key): _cell(key, it) for key, it in row.items()} for row in rows], optional=optional)
    else:
        sys.stdout.write(json.dumps(rows) + "\n" if options.format == "json" else printable(as_csv(rows)))
    return 0


def _heading(key: str) -> str:
    return key if "." in key else words(key.removesuffix("_s"))


def _cell(key: str, value: Any) -> Any:
    if value is None or not key.startswith(("started", "duration_s", "validation_", "test_")):
        return value
    if key == "started":
        return value[5:16].replace("T", " ")
    return duration(value) if key == "duration_s" else value_text(key, value)


def rows_of(runs: Sequence[PastRun], *, now: float) -> list[Row]:
    """Return for each run its folder, state, steps done and wanted, the recipe keys that differ, its times and main scores.

    A key that only runs of one task have is compared among these. `now` is in Unix seconds. Every row has every column; None:
    the run has no value.
    """
    recipes = [flat(run.recipe) for run in runs]
    differ = [key for key in _keys(recipes) if len({str(recipe[key]) for recipe in recipes if key in recipe}) > 1]
    scores = []
    for run in runs:
        wanted = ("loss", *(run.monitor or ())[:1])
        scores.append({key: value for key, value in last_scores(run).items() if key.partition("_")[2] in wanted})
    rows = []
    for run, recipe, own in zip(runs, recipes, scores, strict=True):
        state = state_of(run, now)
        row = {"run": str(run.folder), "state": state.word, "step": state.step, "of": state.total_steps}
        row |= {key: recipe.get(key) for key in differ}
        start_s = run.starts[0].time if run.starts else None
        row["started"] = None if start_s is None else datetime.fromtimestamp(start_s).astimezone().isoformat(timespec="seconds")
        row["duration_s"] = None if start_s is None or state.since is None else round(state.since - start_s, 1)
        rows.append(row | {key: own.get(key) for key in _keys(scores)})
    return rows


def _keys(values: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(key for one in values for key in one))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows, which all have the same columns, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(rows: Sequence[Row], *, optional: Sequence[str] = ()) -> None:
    """Print rows, which all have the same columns, as a table.

    One that is wider than the terminal has no frame, and then loses the `optional` columns, in this order.
    """
    screen, cells = console(), {key: [text_of(row[key]) for row in rows] for key in rows[0]}
    widths = {key: max(map(cell_len, [*_BREAK.split(key), *texts])) for key, texts in cells.items()}
    is_framed = sum(widths.values()) + 3 * len(widths) < screen.width
    hidden = []
    for key in () if is_framed else optional:
        if sum(widths.values()) + 2 * len(widths) - 2 > screen.width and widths.pop(key, None) is not None:
            hidden.append(key)
    table = Table(collapse_padding=not is_framed, pad_edge=is_framed, show_edge=is_framed,
                  box=box.HEAVY_HEAD if is_framed else box.SIMPLE_HEAD)  # fmt: skip
    for key in widths:
        is_number = any(cells[key]) and all(_NUMBER.fullmatch(text) for text in cells[key] if text)
        table.add_column(escape(_BREAK.sub("\n", key)), justify="right" if is_number else "left", overflow="fold",
                         no_wrap=is_number, vertical="bottom")  # fmt: skip
    for row in zip(*(cells[key] for key in widths), strict=True):
        table.add_row(*map(escape, row))
    screen.print(table)
    if hidden:
        print_wrapped(f"no room for: {', '.join(hidden)} (a wider terminal shows them, and so does JSON or CSV)")


def text_of(value: Any) -> str:
    """Return a value as a cell shows it: true, false and lists as in YAML, nothing for None."""
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value)
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
