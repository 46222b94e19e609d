"""`samerun report RUN`: writes the page of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from app.errors import RunFolderError
from app.options.command_line import Parser
from app.record import run_folder
from app.reports import past_run

FILE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and say where it is; return the exit code."""
    parser = Parser(prog="samerun report", description="Write a report of a run as one HTML page.")
    parser.add_argument("run", type=Path, help="run folder; the run may be finished, running or crashed")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: RUN/{FILE})")
    arguments = parser.parse_all(argv)
    from app.reports.page import render  # matplotlib takes half a second, which the help does not need

    run = past_run.read(arguments.run)
    page = arguments.out or arguments.run / FILE
    html, complaints = render(run, time.time())
    try:
        run_folder.write_text(page, html)
    except RunFolderError as error:
        raise RunFolderError(f"{error} Write it elsewhere with --out FILE.") from error
    for complaint in complaints:
        sys.stderr.write(f"note: {complaint}\n")
    sys.stdout.write(f"{page}\n")
    return 0
