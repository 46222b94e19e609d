"""`samerun curves RUN...`: loss and score of several runs, in training and in validation, on one page, as PDF and PNG.

    draw(axes, [run], "loss")                          training as a line, validation as a line with markers
    draw(axes, runs, "accuracy", x="time", parts=["validation"])
    figure, notes = page(runs, xs=["epoch", "time"])   the loss and the scores that judge the runs, with one legend

Runs differ by line style and marker, so also in grey. A quantity is the loss or the name of a score, without its split. What a
run does not have is left out, with a note. matplotlib takes half a second to import, which the help need not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from app.errors import RunFolderError, printable
from app.files.text_files import is_finite
from app.options import Parser
from app.reports.past_run import TEXT_SCORE, Line, PastRun, find, is_share, print_text, quantities, say, words
from app.runs import run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Part = Literal["training", "validation", "test"]
PARTS: tuple[Part, ...] = get_args(Part)

_TIME_UNITS = ((7200, 3600, "h"), (600, 60, "min"), (0, 1, "s"))  # from these seconds on: seconds in the unit, name
_LOG_FROM = 10.0  # largest over smallest, from which on a linear axis would show the end as a flat line
# Four line styles, dark at first and then lighter; in color, those of Okabe and Ito, which all eyes can tell apart.
_LINES = ("-", "--", "-.", ":")
_COLORS = ("#000000", "#0072b2", "#b34f00", "#00694b", "#8c8c8c", "#56b4e9", "#e69f00", "#cc79a7")
_MARKERS = "os^Dv*PX"
_MOST_POINTS = 500  # of a curve; more would be a band instead of a line
_MARKS = 9  # on a line with more points


def main(argv: list[str]) -> int:
    """Draw the runs from the command line, and print the files that were written. Raises RunFolderError for none to draw."""
    parser = Parser(
        prog="samerun curves",
        description="Draw the loss and the score of runs, in training and in validation, as curves.pdf and curves.png.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder, or folder of run folders")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    options = parser.parse_all(argv)
    runs = find(options.runs)
    for complaint in [complaint for run in runs for complaint in run.complaints]:
        say(complaint)
    drawn = [run for run in runs if run.metrics or run.evaluations]
    if not drawn:
        folders = ", ".join(map(str, options.runs))
        raise RunFolderError(f"there is nothing to draw: no run of {folders} has a whole line in metrics.jsonl.")
    figure, notes = page(drawn, xs=columns_of(drawn))
    for note in notes:
        say(note)
    files = write_figure(figure, options.out / "curves")
    print_text("\n".join(map(str, files)))
    return 0


def write_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as STEM.pdf and STEM.png and return the files. Raises RunFolderError."""
    files = [stem.parent / f"{stem.name}.{ending}" for ending in ("pdf", "png")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=150)
    except OSError as error:
        raise RunFolderError(f"{stem.parent} cannot be written: {error.strerror}. Choose another --out.") from error
    return files


class Curve(NamedTuple):
    """Recorded values of a run, by rising step."""

    x: Sequence[float]
    """Epochs (fractional), samples or what else was counted, or seconds since the first start of the run."""
    y: Sequence[float]
    note: str = ""
    """A sentence for whatever is missing."""


def curve(run: PastRun, part: Part, quantity: str, *, x: str = "epoch") -> Curve:
    """Return one curve of a run, without the points that have no value or no place."""
    key = quantity if part == "training" else f"{part}_{quantity}"
    lines: Sequence[Line] = run.metrics if part == "training" else run.evaluations
    lines = [line for line in lines if is_finite(line.get(key))]
    if not lines:
        return Curve([], [], f"{run.name}: no {part} {words(quantity)} is recorded.")
    place, begin, unit, note = x if x in ("epoch", "time") else f"{x}_seen", 0.0, 1.0, ""
    if x == "epoch" and run.samples_per_epoch:
        place, unit = "samples_seen", run.samples_per_epoch
    elif x == "time":
        times = (line["time"] for line in (*run.metrics, *run.evaluations) if is_finite(line.get("time")))
        begin = run.starts[0].launched if run.starts else min(times, default=0.0)
    placed = [line for line in lines if is_finite(line.get(place))]
    if len(placed) < len(lines):
        note = f"{run.name}: lines without {words(place)} are left out."
    return Curve([(line[place] - begin) / unit for line in placed], [float(line[key]) for line in placed], note)


def parts_of(runs: Sequence[PastRun], quantity: str) -> list[Part]:
    """Return the parts that a quantity of these runs is expected of; test, a point at the end, where there is no validation."""
    is_trained = quantity == "loss" or any(quantity in line for run in runs for line in run.metrics)
    recorded = {key for run in runs for line in run.evaluations for key in line}
    is_only_tested = f"test_{quantity}" in recorded and f"validation_{quantity}" not in recorded
    evaluated: Part = "test" if is_only_tested else "validation"
    return ["training", evaluated] if is_trained else [evaluated]


def columns_of(runs: Sequence[PastRun]) -> tuple[str, str]:
    """Return what runs are drawn against: epochs, or the unit that all of their tasks count, and time."""
    units = {run.unit for run in runs}
    return ("epoch" if len(units) > 1 or run_folder.UNIT in units else units.pop(), "time")


def labels(runs: Sequence[PastRun]) -> list[str]:
    """Return a name for each run: its folder's, or its path where two folders have one name."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [printable(str(run.folder)) for run in runs]


def draw(
    axes: Axes, runs: Sequence[PastRun], quantity: str, *, x: str = "epoch", parts: Sequence[Part] | None = None
) -> list[str]:
    """Draw the curves of the runs, with labels for a legend, and return the sentences about what is missing.

    `parts` are by default those that are expected of the quantity.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    parts = parts_of(runs, quantity) if parts is None else parts
    curves = [[curve(run, part, quantity, x=x) for part in parts] for run in runs]
    drawn = [value for of_run in curves for found in of_run for value in found.y]
    scale = 100 if is_share(quantity, drawn) else 1
    seconds, x_label = 1, "epoch" if x == "epoch" else f"{x} seen"
    if x == "time":  # of all that is recorded, since panels share the axis
        last_s = max((curve(run, part, "loss", x=x).x[-1:] or [0.0])[0] for run in runs for part in PARTS)
        seconds, unit = next((seconds, unit) for least_s, seconds, unit in _TIME_UNITS if last_s >= least_s)
        x_label = f"time since the start ({unit})"
    for number, (name, of_run) in enumerate(zip(labels(runs), curves, strict=True)):
        for part, found in zip(parts, of_run, strict=True):
            size = max(1, -(-len(found.y) // _MOST_POINTS))
            places, values = (
                [fmean(values[first : first + size]) for first in range(0, len(values), size)] for values in (found.x, found.y)
            )
            label = part if len(runs) == 1 else name if len(parts) == 1 else f"{name}, {part}"
            if values:
                axes.plot(
                    [place / seconds for place in places],
                    [scale * value for value in values],
                    label=_legend_text(label),
                    **_style(number, part, len(values), alone=len(parts) == 1),
                )
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{parts[0] + ' ' if len(parts) == 1 else ''}{words(quantity)}{' (%)' if scale == 100 else ''}")
    axes.set_xlim(left=0.0, auto=True)  # wide enough for what is still drawn in panels that share the axis
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x == "epoch", min_n_ticks=2, steps=[1, 2, 5, 10]))
    if x not in ("epoch", "time"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    falls = quantity in ("loss", TEXT_SCORE) or any(run.monitor == (quantity, "min") for run in runs)
    if falls and drawn and 0 < _LOG_FROM * min(drawn) < max(drawn):
        axes.set_yscale("log")
    axes.grid(visible=True, color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return [found.note for of_run in curves for found in of_run if found.note]


def _legend_text(text: str) -> str:
    """Return a text that matplotlib takes neither for a formula nor for the name of a line without a label."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _style(number: int, part: Part, points: int, *, alone: bool) -> dict[str, Any]:
    """Return how the line of a run is drawn; `alone`: only this part is drawn, so training lines can have markers too."""
    style: dict[str, Any] = {
        "linestyle": _LINES[(number + number // len(_MARKERS)) % len(_LINES)],
        "color": _COLORS[number % len(_COLORS)],
        "linewidth": max(0.9, 2.0 - 0.3 * number),
    }
    if part == "training" and not alone:
        dot = {"marker": ".", "markersize": 8.0} if points == 1 else {}  # a line of one point is invisible
        return {**style, **dot, "linewidth": 0.6 * style["linewidth"]}
    spacing = max(1, points // _MARKS)
    return {
        **style,
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white",
        "markersize": max(4.0, 7.0 - 0.7 * number),
        "markevery": slice(number * spacing // 3 % spacing, None, spacing),  # side by side where runs coincide
    }


def page(runs: Sequence[PastRun], *, xs: Sequence[str] = ("epoch",)) -> tuple[Figure, list[str]]:
    """Return a figure with a column for each of `xs`, and the sentences about what is missing.

    It has the loss and the scores that judge the runs. Of one run, training and validation share a panel; of several, each has
    its own. One legend is above all panels.
    """
    from matplotlib.figure import Figure

    rows: list[tuple[str, Sequence[Part]]] = []
    for quantity in quantities(runs):
        parts = parts_of(runs, quantity)
        rows += [(quantity, parts)] if len(runs) == 1 else [(quantity, [part]) for part in parts]
    figure = Figure(figsize=(max(7.0, 4.6 * len(xs)), 0.7 + 2.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(xs), sharex="col", sharey="row", squeeze=False)
    notes: list[str] = []
    for (quantity, own), panels in zip(rows, grid, strict=True):
        for axes, x in zip(panels, xs, strict=True):
            notes += draw(axes, runs, quantity, x=x, parts=own)
            axes.label_outer()
    entries = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if entries:
        title = _legend_text(runs[0].name) if len(runs) == 1 else None
        figure.legend(
            entries.values(), entries.keys(), title=title, loc="outside upper center", ncols=4, frameon=False, handlelength=4
        )
    return figure, list(dict.fromkeys(notes))
