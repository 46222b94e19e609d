"""`samerun curves RUN...`: loss and score of several runs, in training and in validation, on one page, as PDF and PNG.

Reads run folders and nothing else. What a run does not have is a sentence on stderr, and everything else is drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import RunFolderError, printable
from app.options import Parser, names
from app.reports.past_run import find, quantities, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(argv: list[str]) -> int:
    """Draw the runs from the command line, and print the files that were written. Raises RunFolderError for none to draw."""
    parser = Parser(
        prog="samerun curves",
        description="Draw the loss and the score of runs, in training and in validation, as curves.pdf and curves.png.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder, or folder of run folders")
    parser.add_argument(
        "--x", type=names, metavar="X", help="what to draw against, a column each (default: epoch,time; tokens in place of "
        "epoch if the runs count these; both if their epochs differ in size)"
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--each", action="store_true", help="also loss_NAME.pdf and SCORE_NAME.pdf of each run, such as "
                        "accuracy_NAME.pdf, against the first of --x"
                        )  # fmt: skip
    options = parser.parse_all(argv)
    from app.reports import plots  # matplotlib takes half a second, which the help does not need

    runs = find(options.runs)
    for complaint in [complaint for run in runs for complaint in run.complaints]:
        say(complaint)
    drawn = [run for run in runs if run.metrics or run.evaluations]
    if not drawn:
        folders = ", ".join(map(str, options.runs))
        raise RunFolderError(f"there is nothing to draw: no run of {folders} has a whole line in metrics.jsonl.")
    xs = options.x or plots.columns_of(drawn)
    known = dict.fromkeys([*plots.XS, *(run.unit for run in drawn)])
    if unknown := [x for x in xs if x not in known]:
        parser.error(f"argument --x: {','.join(unknown)!r}: expected some of {','.join(known)}, with commas between them")
    page, notes = plots.page(drawn, xs=xs)
    for note in notes:
        say(note)
    files = write_figure(page, options.out / "curves", "pdf", "png")
    if options.each:
        for run, name in zip(drawn, plots.labels(drawn), strict=True):
            for quantity in quantities([run]):
                page, _ = plots.page([run], only=[quantity], xs=xs[:1])
                files += write_figure(page, options.out / f"{quantity}_{name.replace('/', '-')}", "pdf")
    sys.stdout.write(printable("".join(f"{file}\n" for file in files)))
    return 0


def write_figure(figure: Figure, stem: Path, *endings: str) -> list[Path]:
    """Write a figure as STEM.ENDING for each ending and return the files. Raises RunFolderError."""
    files = [stem.parent / f"{stem.name}.{ending}" for ending in endings]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=150)
    except OSError as error:
        raise RunFolderError(f"{stem.parent} cannot be written: {error.strerror}. Choose another --out.") from error
    return files
