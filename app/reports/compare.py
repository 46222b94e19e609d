"""`samerun compare RUN RUN...`: show what differs between two runs, and whether they were the same run.

Of more runs, or as Markdown or CSV, it is the table of `samerun runs`, with a column for those that are the same as the first.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from app.options.command_line import Parser
from app.options.values import tolerance
from app.reports import past_run
from app.reports.comparison import DECIDING_STEPS, compare
from app.reports.runs import FORMATS, SafeConsole, rows_of, write


def main(argv: list[str]) -> int:
    """Compare runs from the command line; 0 only if they were the same run."""
    parser = Parser(
        prog="samerun compare",
        description="Show what differs between two runs, and whether they are the same run (exit code 0) or not (1). More runs "
        "become a table with a row each, which shows the runs that are the same as the first.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--format", choices=FORMATS, default="table", help="output format; markdown and csv have a "
                        "row for each run, also for two (default: table)")  # fmt: skip
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    parser.add_argument("--tolerance", type=tolerance, help="largest relative difference between losses in the first "
                        f"{DECIDING_STEPS} steps of the same run (default: 1e-5 in the first 20 steps, then 1e-4)")  # fmt: skip
    options = parser.parse_all(argv)
    if len(options.runs) < 2:
        parser.error("give two runs, or more")
    runs = [past_run.read(folder) for folder in options.runs]
    for complaint in [complaint for run in runs for complaint in run.complaints]:
        past_run.say(complaint)
    found = [compare(runs[0], other, tolerance=options.tolerance) for other in runs[1:]]
    if len(found) > 1 or options.format in ("csv", "markdown"):
        same = ["", *({True: "yes", False: "no", None: "not known"}[it.is_same] for it in found)]
        rows = rows_of(runs, now=time.time())
        write([row | {"same run as the first": word} for row, word in zip(rows, same, strict=True)], options.format)
    elif options.format == "json":
        values = asdict(found[0])
        if math.isinf(found[0].losses.largest):
            values["losses"]["largest"] = None  # JSON has no infinity
        same_run = {"runs": [str(run.folder) for run in runs], "same_run": found[0].is_same, "verdict": str(found[0])}
        sys.stdout.write(json.dumps({**same_run, **values}) + "\n")
    else:
        from app.reports.plots import labels  # matplotlib takes half a second, which the others do not need

        console = SafeConsole() if sys.stdout.isatty() else SafeConsole(width=120)
        tables = {"recipe: what differs": found[0].recipe or {}, "preset: what differs": found[0].preset}
        tables |= {"processes and versions: what differs": found[0].machines, "results": found[0].results}
        for title, pairs in tables.items():
            is_results = title == "results"
            if not pairs and not is_results:
                continue
            table = Table()
            table.add_column("")
            for name in [*labels(runs), *(["difference"] if is_results else [])]:
                table.add_column(escape(name), justify="right" if is_results else "left", overflow="fold")
            for key, pair in pairs.items():
                difference = [_difference(*pair)] if is_results else []
                table.add_row(*(escape(cell) for cell in (key, *map(_text, pair), *difference)))
            console.print(title)
            console.print(table)
        console.print(str(found[0]), markup=False, highlight=False)
    return 0 if all(it.is_same for it in found) else 1


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)


def _difference(one: Any, other: Any) -> str:
    """Return the second number less the first, and its share of the first."""
    if not all(isinstance(value, (int, float)) for value in (one, other)):
        return ""
    return f"{other - one:+,.6g}" + (f" ({other / one - 1:+.2%})" if one else "")
