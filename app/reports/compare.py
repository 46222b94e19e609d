"""`samerun compare RUN RUN...`: shows what differs between two runs, and says whether they were the same one.

Of more runs, or as Markdown or CSV, it is the table of `samerun runs`, and a column says which were the same as the first.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from app.options.command_line import Parser
from app.options.values import tolerance
from app.reports import past_run
from app.reports import runs as runs_table
from app.reports.comparison import DECIDING_STEPS, TOLERANCE, Comparison, compare
from app.reports.curves import say
from app.reports.past_run import PastRun

_SAME = "same run as the first"
_WIDTH = 120  # of the tables where there is no terminal to fit into, in characters


def main(argv: list[str]) -> int:
    """Compare runs from the command line; 0 only if they were the same run."""
    parser = _parser()
    options = parser.parse_all(argv)
    if len(options.runs) < 2:
        parser.error("give two runs, or more")
    from app.reports import plots  # matplotlib takes half a second, which the help does not need

    runs = [past_run.read(folder) for folder in options.runs]
    for run in runs:
        for complaint in run.complaints:
            say(complaint)
    found = [compare(runs[0], other, tolerance=options.tolerance) for other in runs[1:]]
    if len(found) > 1 or options.format in ("csv", "markdown"):
        same = ["", *({True: "yes", False: "no", None: "not known"}[it.is_same] for it in found)]
        rows = runs_table.rows_of(runs, now=time.time())
        runs_table.write([row | {_SAME: said} for row, said in zip(rows, same, strict=True)], options.format)
    elif options.format == "json":
        sys.stdout.write(json.dumps(_as_json(runs, found[0])) + "\n")
    else:
        _print(plots.labels(runs), found[0])
    return 0 if all(it.is_same for it in found) else 1


def _as_json(runs: Sequence[PastRun], found: Comparison) -> dict[str, Any]:
    values = asdict(found)
    if math.isinf(found.losses.largest):
        values["losses"]["largest"] = None  # JSON has no infinity
    return {"runs": [str(run.folder) for run in runs], "same_run": found.is_same, "verdict": str(found), **values}


def _print(names: Sequence[str], found: Comparison) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for title, pairs in (("recipe", found.recipe or {}), ("preset", found.preset), ("processes and versions", found.machines)):
        if pairs:
            console.print(f"{title}: what differs")
            table = _table(names)
            for key, pair in pairs.items():
                table.add_row(escape(key), *(escape(_shown(value)) for value in pair))
            console.print(table)
    console.print("results")
    table = _table([*names, "difference"], justify="right")
    for key, pair in found.results.items():
        table.add_row(key, *map(_shown, pair), _difference(*pair))
    console.print(table)
    console.print(str(found), markup=False, highlight=False)


def _table(names: Sequence[str], justify: JustifyMethod = "left") -> Table:
    table = Table()
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify=justify, overflow="fold")
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _difference(one: Any, other: Any) -> str:
    """The second number less the first, and its share of the first."""
    if not all(isinstance(value, (int, float)) for value in (one, other)):
        return ""
    return f"{other - one:+,.6g}" + (f" ({other / one - 1:+.2%})" if one else "")


def _parser() -> Parser:
    parser = Parser(
        prog="samerun compare",
        description="Show what differs between two runs, and whether they are the same run (exit code 0) or not (1). More runs "
        "become a table with a row each, which shows the runs that are the same as the first.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--format", choices=runs_table.FORMATS, default="table", help="output format; markdown and csv have a "
                        "row for each run, also for two (default: table)")  # fmt: skip
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    parser.add_argument("--tolerance", type=tolerance, default=TOLERANCE, help="largest relative difference between losses in "
                        f"the first {DECIDING_STEPS} steps of the same run (default: {TOLERANCE:g})"
                        )  # fmt: skip
    return parser
