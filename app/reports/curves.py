"""`samerun curves RUN...`: loss and score of several runs, in training and in validation, on one page, as PDF and PNG.

    draw(axes, [run], "loss")                          training as a line, validation as a line with markers
    draw(axes, runs, "accuracy", x="time", parts=["validation"])
    figure, notes = page(runs)                         the loss and the scores that judge the runs

Of one run, training and validation differ by color, lightness and marker; several runs by line style and marker, so also in
grey. A training value that is a mean over the steps since the last line is drawn in the middle of these steps. A quantity is
the loss or the name of a score, without its split. What a run does not have is left out, with a note. matplotlib takes half a
second to import, which the help need not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from app.errors import RunFolderError, printable
from app.files.atomic_files import disk_errors
from app.files.text_files import is_finite
from app.options import Parser
from app.reports.past_run import TEXT_SCORE, Line, PastRun, find, is_share, print_text, quantities, say, words
from app.runs import run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Part = Literal["training", "validation", "test"]

_TIME_UNITS = ((7200, 3600, "h"), (600, 60, "min"), (0, 1, "s"))  # from these seconds on: seconds in the unit, name
_LOG_FROM = 10.0  # largest over smallest, from which on a linear axis would show the end as a flat line
# Four line styles, dark at first and then lighter; in color, those of Okabe and Ito, which all eyes can tell apart.
_LINES = ("-", "--", "-.", ":")
PART_COLORS: dict[Part, str] = {"training": "#56a0d3", "validation": "#b34f00", "test": "#00694b"}
"""Colors of one run. Training is the lightest."""
_COLORS = ("#000000", "#0072b2", "#b34f00", "#00694b", "#8c8c8c", "#56b4e9", "#e69f00", "#cc79a7")
_MARKERS = "os^Dv*PX"
_MOST_POINTS = 500  # of a curve; more would be a band instead of a line
_MARKS = 9  # on a line with more points, next to others
_AT_ITS_STEP = ("learning_rate", "grad_norm", "memory_bytes")
"""Numbers of training that are no mean over the steps since the last line."""


def main(argv: list[str]) -> int:
    """Draw the runs from the command line, and print the files that were written. Raises RunFolderError for none to draw."""
    parser = Parser("curves", "Draw loss and score of runs, in training and in validation, as curves.pdf and curves.png.")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="run folder, or folder of run folders (default: the "
        "newest run in runs/)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(), metavar="PATH", help="folder to write to (default: here)")
    options = parser.parse_all(argv)
    runs = find(options.runs or [run_folder.newest()])
    for complaint in [complaint for run in runs for complaint in run.complaints]:
        say(complaint)
    drawn = [run for run in runs if run.metrics or run.evaluations]
    if not drawn:
        raise RunFolderError("there is nothing to draw: none of the runs has a whole line in metrics.jsonl.")
    figure, notes = page(drawn)
    for note in notes:
        say(note)
    files = write_figure(figure, options.out / "curves")
    print_text("\n".join(map(str, files)))
    return 0


def write_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as STEM.pdf and STEM.png and return the files. Raises RunFolderError."""
    files = [stem.parent / f"{stem.name}.{ending}" for ending in ("pdf", "png")]
    with disk_errors(stem.parent, "written", RunFolderError):
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            figure.savefig(file, dpi=150)
    return files


class Curve(NamedTuple):
    """Recorded values of a run, by rising step."""

    x: Sequence[float]
    """Epochs (fractional), samples or what else was counted, or seconds of training."""
    y: Sequence[float]
    note: str = ""
    """A sentence for whatever is missing."""


def curve(run: PastRun, part: Part, quantity: str, *, x: str = "epoch") -> Curve:
    """Return one curve of a run, without the points that have no value or no place."""
    key = quantity if part == "training" else f"{part}_{quantity}"
    all_lines: Sequence[Line] = run.metrics if part == "training" else run.evaluations
    lines = [line for line in all_lines if is_finite(line.get(key))]
    if not lines:
        return Curve([], [], f"{run.name}: no {part} {words(quantity)} is recorded.")
    places, name = _places(run, all_lines, x)
    placed = [line for line in lines if line["step"] in places]
    note = f"{run.name}: lines without {name} are left out." if len(placed) < len(lines) else ""
    at = dict(places)
    if part == "training" and quantity not in _AT_ITS_STEP:
        first = run.starts[0].from_step if run.starts and x != "time" else 0
        begins = [place * first / step for step, place in list(places.items())[:1]] + list(places.values())
        at = {step: (begin + end) / 2 for (step, end), begin in zip(places.items(), begins, strict=False)}
    return Curve([at[line["step"]] for line in placed], [float(line[key]) for line in placed], note)


def _places(run: PastRun, lines: Sequence[Line], x: str) -> tuple[dict[int, float], str]:
    """Return where the lines are on an axis, by step, and what that is the value of."""
    if x == "time":
        import numpy as np

        known = {0: 0.0, **run.training_s}
        at = np.interp([line["step"] for line in lines], list(known), list(known.values())).tolist()
        return dict(zip((line["step"] for line in lines), at, strict=True)) if len(known) > 1 else {}, "training time"
    key, unit = (x if x == "epoch" else f"{x}_seen"), 1.0
    if x == "epoch" and run.samples_per_epoch:
        key, unit = "samples_seen", run.samples_per_epoch
    return {line["step"]: line[key] / unit for line in lines if is_finite(line.get(key))}, words(key)


def parts_of(runs: Sequence[PastRun], quantity: str) -> list[Part]:
    """Return the parts that a quantity of these runs is expected of; test, a point at the end, where there is no validation."""
    is_trained = quantity == "loss" or any(quantity in line for run in runs for line in run.metrics)
    recorded = {key for run in runs for line in run.evaluations for key in line}
    is_only_tested = f"test_{quantity}" in recorded and f"validation_{quantity}" not in recorded
    evaluated: Part = "test" if is_only_tested else "validation"
    return ["training", evaluated] if is_trained else [evaluated]


def progress_of(run: PastRun) -> str:
    """Return what a run is drawn against: epochs, or the unit that its task counts."""
    return "epoch" if run.unit == run_folder.UNIT else run.unit


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
    scale = 100 if is_share(quantity, drawn) else 2**-30 if quantity == "memory_bytes" else 1
    seconds, x_label = 1, "epoch" if x == "epoch" else f"{x} seen"
    if x == "time":  # of all that is recorded, since panels share the axis
        last_s = max((max(run.training_s.values(), default=0.0) for run in runs), default=0.0)
        seconds, unit = next((seconds, unit) for least_s, seconds, unit in _TIME_UNITS if last_s >= least_s)
        x_label = f"training time ({unit})"
    for number, (name, of_run) in enumerate(zip(labels(runs), curves, strict=True)):
        for part, found in zip(parts, of_run, strict=True):
            size = max(1, -(-len(found.y) // _MOST_POINTS))
            starts = range(0, len(found.y), size)
            places = [fmean(found.x[start : start + size]) / seconds for start in starts]
            values = [fmean(found.y[start : start + size]) * scale for start in starts]
            label = part if len(runs) == 1 else name if len(parts) == 1 else f"{name}, {part}"
            style = _style(number if len(runs) > 1 else None, part, len(values))
            if values:
                axes.plot(places, values, label=_legend_text(label), **style)
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{parts[0] + ' ' if len(parts) == 1 else ''}{words(quantity)}{' (%)' if scale == 100 else ''}")
    axes.set_xlim(left=0.0, auto=True)  # wide enough for what is still drawn in panels that share the axis
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x == "epoch", min_n_ticks=2, steps=[1, 2, 5, 10]))
    if x not in ("epoch", "time"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    falls = quantity in ("loss", TEXT_SCORE) or any(run.monitor == (quantity, "min") for run in runs)
    if falls and drawn and 0 < _LOG_FROM * min(drawn) < max(drawn):
        label_log_axis(axes, "{x:g}")
    axes.grid(visible=True, color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return [found.note for of_run in curves for found in of_run if found.note]


def label_log_axis(axes: Axes, form: str) -> None:
    """Make the y axis logarithmic, and label it within a decade too, as far as labels do not overlap."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1, 2, 3, 5) if high < 50 * low else (1, 2, 5) if high < 1000 * low else (1, 3) if high < 1e5 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(form)
    axes.yaxis.set_minor_formatter("")


def _legend_text(text: str) -> str:
    """Return a text that matplotlib takes neither for a formula nor for the name of a line without a label."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def _style(number: int | None, part: Part, points: int) -> dict[str, Any]:
    """Return how a line is drawn; `number`: of the run among several, whose parts are not in one panel."""
    if number is None:
        style = {"color": PART_COLORS[part], "linewidth": 1.4 if part == "training" else 1.8}
        if part == "training":
            return {**style, **({"marker": ".", "markersize": 8.0} if points == 1 else {})}  # a line of one point is invisible
        return {**style, "marker": "o", "markerfacecolor": "white", "markersize": 4.5, "markevery": max(1, points // 40)}
    spacing = max(1, points // _MARKS)
    return {
        "linestyle": _LINES[(number + number // len(_MARKERS)) % len(_LINES)],
        "color": _COLORS[number % len(_COLORS)],
        "linewidth": max(0.9, 2.0 - 0.3 * number),
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white",
        "markersize": max(4.0, 7.0 - 0.7 * number),
        "markevery": slice(number * spacing // 3 % spacing, None, spacing),  # side by side where runs coincide
    }


def page(runs: Sequence[PastRun]) -> tuple[Figure, list[str]]:
    """Return a figure with a column for the progress and one for the time, and the sentences about what is missing.

    It has the loss and the scores that judge the runs. Of one run, training and validation share a panel; of several, each has
    its own. Runs of unlike tasks share neither panels nor axes nor a legend.
    """
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], list[PastRun]] = {}
    for run in runs:
        groups.setdefault((Path(str(run.about.get("task"))).stem, run.unit), []).append(run)
    rows = list[list[tuple[str, list[Part]]]]()
    for group in groups.values():
        own = [(quantity, parts_of(group, quantity)) for quantity in quantities(group)]
        rows.append(own if len(group) == 1 else [(quantity, [part]) for quantity, parts in own for part in parts])
    heights = [0.7 + 2.5 * len(own) for own in rows]
    figure, notes = Figure(figsize=(9.6, sum(heights)), layout="constrained"), list[str]()
    places = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ((task, _), group), own, place in zip(groups.items(), rows, places, strict=True):
        grid = place.subplots(len(own), 2, sharex="col", sharey="row", squeeze=False, gridspec_kw={"wspace": 0.05})
        for (quantity, parts), panels in zip(own, grid, strict=True):
            for axes, x in zip(panels, (progress_of(group[0]), "time"), strict=True):
                notes += draw(axes, group, quantity, x=x, parts=parts)
                axes.label_outer()
        place.align_ylabels(grid[:, 0])
        entries = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        title = group[0].name if len(group) == 1 else task if len(groups) > 1 else ""
        style = {"title": _legend_text(title), "loc": "outside upper center", "ncols": 4, "frameon": False, "handlelength": 4}
        if entries:
            place.legend(entries.values(), entries.keys(), **style)
    return figure, list(dict.fromkeys(notes))
