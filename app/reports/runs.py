"""`samerun runs [FOLDER...]`: a table of runs, with their states, their scores and what differs between their recipes."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.options.command_line import Parser
from app.reports.curves import find
from app.reports.named_scores import last_scores, words
from app.reports.past_run import PastRun, flat
from app.reports.state import state_of

Row = dict[str, Any]
_FOLDERS = Path("runs")
FORMATS = ("table", "json", "csv", "markdown")


def main(argv: list[str]) -> int:
    """Print the table. Raises RunFolderError if there are no runs, and for a column that none has."""
    options = _parser().parse_all(argv)
    found = find(options.folders)
    if not found:
        raise RunFolderError(
            f"there are no runs in {', '.join(map(str, options.folders))}: give run folders, or folders of run folders."
        )
    rows = rows_of(found, now=time.time())
    if options.sort:
        rows = _in_order(rows, options.sort, reverse=options.reverse)
    write(rows, options.format)
    return 0


def rows_of(runs: Sequence[PastRun], *, now: float) -> list[Row]:
    """Return for each run its folder, state, steps done and wanted, what of its recipe others have otherwise, and its scores.

    A key that only runs of one task have is compared among these.

    `now` is in Unix seconds. Every row has every column; None: the run has none.
    """
    recipes = [flat(run.recipe) for run in runs]
    differ = [key for key in _keys(recipes) if len({str(recipe[key]) for recipe in recipes if key in recipe}) > 1]
    scores = [_main_scores(run) for run in runs]
    rows = []
    for run, recipe, own in zip(runs, recipes, scores, strict=True):
        state = state_of(run, now)
        row = {"run": str(run.folder), "state": state.word, "step": state.step, "of": state.total_steps}
        row |= {key: recipe.get(key) for key in differ}
        rows.append(row | {key: own.get(key) for key in _keys(scores)})
    return rows


def _main_scores(run: PastRun) -> dict[str, float]:
    """The scores of a split by which the run is judged, and the losses."""
    wanted = {"loss", *(run.monitor or ())[:1]}
    return {key: value for key, value in last_scores(run).items() if key.partition("_")[2] in wanted}


def _keys(values: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for one in values for key in one))


def _in_order(rows: list[Row], key: str, *, reverse: bool) -> list[Row]:
    """Sort by a column; those without a value are last."""
    if key not in rows[0]:
        raise RunFolderError(f"--sort {key}: the columns are {', '.join(rows[0])}.")
    there = [row for row in rows if row[key] is not None]
    as_numbers = all(isinstance(row[key], (int, float)) for row in there)
    there.sort(key=lambda row: row[key] if as_numbers else str(row[key]), reverse=reverse)
    return there + [row for row in rows if row[key] is None]


def write(rows: Sequence[Row], form: str) -> None:
    """Print rows, which all have the same columns, in one of FORMATS."""
    if form == "json":
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    if form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return
    heads = [words(key) if _is_score(key, rows) else key for key in rows[0]]
    cells = [[_text(value) for value in row.values()] for row in rows]
    if form == "markdown":
        lines = [heads, ["---"] * len(heads), *cells]
        sys.stdout.write("".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console, table = Console() if sys.stdout.isatty() else Console(width=160), Table()
    gone = _too_wide([*map(list, zip(heads, *cells, strict=True))], list(rows[0]), console.width)
    heads, *cells = [[cell for at, cell in enumerate(line) if at not in gone] for line in (heads, *cells)]
    for head, key in zip(heads, (key for at, key in enumerate(rows[0]) if at not in gone), strict=True):
        table.add_column(
            escape(head), justify="right" if _is_score(key, rows) or key in ("step", "of") else "left", overflow="fold"
        )
    for line in cells:
        table.add_row(*map(escape, line))
    console.print(table)
    if gone:
        hidden = ", ".join(key for at, key in enumerate(rows[0]) if at in gone)
        console.print(f"too wide to show, and also different: {hidden} (--format csv has all)", markup=False, highlight=False)


def _too_wide(columns: list[list[str]], keys: list[str], width: int) -> set[int]:
    """Return which columns of recipe keys to leave out, from the last, so that each of the others has a line for itself."""
    widths = [3 + max(map(len, column)) for column in columns]
    gone = set[int]()
    for at in reversed([at for at, key in enumerate(keys) if "." in key]):
        if 1 + sum(each for other, each in enumerate(widths) if other not in gone) > width:
            gone.add(at)
    return gone


def _is_score(key: str, rows: Sequence[Row]) -> bool:
    return any(isinstance(row[key], float) for row in rows) and "." not in key


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parser() -> Parser:
    parser = Parser(
        prog="samerun runs",
        description="List runs: their states, their scores, and the recipe keys in which they differ.",
    )
    parser.add_argument("folders", type=Path, nargs="*", default=[_FOLDERS], metavar="RUN",
                        help="run folder, or a folder of run folders (default: runs)")  # fmt: skip
    parser.add_argument(
        "--sort", metavar="COLUMN", help="sort by this column, smallest first; --format csv shows the column names"
    )
    parser.add_argument("--reverse", action="store_true", help="with --sort: largest first")
    parser.add_argument("--format", choices=FORMATS, default="table", help="output format (default: table)")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    return parser
