"""`samerun runs [FOLDER...]`: a table of runs, with their states, their scores and what differs between their recipes."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from app.errors import RunFolderError, printable
from app.options import Parser
from app.reports.past_run import PastRun, find, flat, last_scores, state_of, words

Row = dict[str, Any]
FORMATS = ("table", "json", "csv")
_MOST_RECIPE_KEYS = 5
"""Columns for recipe keys that differ; more make a table unreadable."""


class SafeConsole(Console):
    """A rich console that shows all control characters in texts as escapes; rich itself removes only a few of them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return rich's segments; only those that rich itself has made may command the terminal."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def console(width: int = 160) -> SafeConsole:
    """Return a console as wide as the terminal, or `width` characters without one."""
    return SafeConsole(highlight=False, width=None if sys.stdout.isatty() else width)


def main(argv: list[str]) -> int:
    """Print the table. Raises RunFolderError if there are no runs, and for a column that none has."""
    parser = Parser(
        prog="samerun runs",
        description="List runs: their states, their scores, and the recipe keys in which they differ.",
    )
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("runs")], metavar="RUN",
                        help="run folder, or a folder of run folders (default: runs)")  # fmt: skip
    parser.add_argument("--sort", metavar="COLUMN", help="sort by this column, smallest first (--format csv shows the names)")
    parser.add_argument("--reverse", action="store_true", help="with --sort: largest first")
    parser.add_argument("--format", choices=FORMATS, default="table", help="output format (default: table)")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    options = parser.parse_all(argv)
    runs = find(options.folders)
    if not runs:
        raise RunFolderError(
            f"there are no runs in {', '.join(map(str, options.folders))}: give run folders, or folders of run folders."
        )
    rows = rows_of(runs, now=time.time())
    if (key := options.sort) and key not in rows[0]:
        raise RunFolderError(f"--sort {key}: the columns are {', '.join(rows[0])}.")
    if key:  # rows without a value are last
        known = [row for row in rows if row[key] is not None]
        are_numbers = all(isinstance(row[key], (int, float)) for row in known)
        known.sort(key=lambda row: row[key] if are_numbers else str(row[key]), reverse=options.reverse)
        rows = known + [row for row in rows if row[key] is None]
    write(rows, options.format)
    return 0


def rows_of(runs: Sequence[PastRun], *, now: float) -> list[Row]:
    """Return for each run its folder, state, steps done and wanted, the recipe keys that differ, and its main scores.

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


def write(rows: Sequence[Row], form: str) -> None:
    """Print rows, which all have the same columns, in one of FORMATS."""
    if form == "json":
        sys.stdout.write(json.dumps(rows) + "\n")
    elif form == "csv":
        sys.stdout.write(printable(as_csv(rows)))
    else:
        table, hidden = Table(), [key for key in rows[0] if "." in key][_MOST_RECIPE_KEYS:]
        shown = [key for key in rows[0] if key not in hidden]
        for key in shown:
            is_number = "." not in key and any(isinstance(row[key], (int, float)) for row in rows)
            table.add_column(
                escape(words(key) if is_number else key), justify="right" if is_number else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*(escape(_text(row[key])) for key in shown))
        console().print(table)
        if hidden:
            console().print(f"also different: {', '.join(hidden)} (--format csv has all)", markup=False)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
