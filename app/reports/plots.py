"""Loss and scores of past runs as lines on matplotlib axes.

    draw(axes, [run], "loss")                          training as a line, validation as a line with markers
    draw(axes, runs, "accuracy", x="time", parts=["validation"])
    figure, notes = page(runs, xs=["epoch", "time"])   the loss and what the runs are judged by, with one legend

A quantity is the loss or the name of a score, without its split; which scores there are, the runs tell.

A run is told by its line style and marker, so that it can be printed in grey; of runs that lie upon each other, each later
line is thinner than those below. Whatever a run does not have is left out, and what `curve` returns says so.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from app.files.lines import is_finite
from app.record import ledger, run_folder
from app.reports.named_scores import FOLLOWED, LOSS, is_share, key_of, quantities, words
from app.reports.past_run import Line, PastRun

Part = Literal["training", "validation", "test"]
X = str
"""One of XS, or what the runs count, such as tokens."""
PARTS: tuple[Part, ...] = get_args(Part)
XS: tuple[X, ...] = ("epoch", run_folder.UNIT, "time")

_TIME_UNITS = ((7200.0, 3600.0, "h"), (600.0, 60.0, "min"), (0.0, 1.0, "s"))  # from so many seconds on: seconds in it, name
_LOG_FROM = 10.0  # largest over smallest, from which on what happens at the end would be a flat line otherwise
_DECADES_FROM = 100.0  # from which on a logarithmic axis has a label for each decade, and none between

# Four line styles, dark at first and then lighter; in colour, those of Okabe and Ito, which all eyes tell apart.
_LINES = ("-", "--", "-.", ":")
_COLOURS = ("#000000", "#0072b2", "#b34f00", "#00694b", "#8c8c8c", "#56b4e9", "#e69f00", "#cc79a7")
_MARKERS = "os^Dv*PX"
_MOST_POINTS = 500  # of a curve; more lie beside each other on paper, and make a band of what should be a line
_MARKS = 9  # on the line of a run whose points are too many to mark each


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What was recorded of a run, by rising step."""

    x: Sequence[float]
    """Epochs (fractional), samples or what else was counted, or seconds since the first start of the run."""
    y: Sequence[float]
    """As it was recorded."""
    notes: Sequence[str]
    """A sentence for whatever is not there, or is not quite what was asked for."""


def curve(run: PastRun, part: Part, quantity: str, *, x: X = "epoch") -> Curve:
    """Return one curve of a run, without the points that have no value or no place."""
    lines: Sequence[Line] = run.metrics if part == "training" else run.evaluations
    key = quantity if part == "training" else key_of(part, quantity)
    lines = [line for line in lines if is_finite(line.get(key))]
    if not lines:
        return Curve(x=[], y=[], notes=[f"{run.name}: no {part} {words(quantity)} is recorded."])
    places, note = {"epoch": _epochs, "time": _seconds}[x](run, lines) if x in ("epoch", "time") else _seen(run, lines, x)
    points = [(place, float(line[key])) for place, line in zip(places, lines, strict=True) if place is not None]
    return Curve(x=[place for place, _ in points], y=[value for _, value in points], notes=[note] if note else [])


def parts_of(runs: Sequence[PastRun], quantity: str) -> list[Part]:
    """Return the parts that a quantity of these runs is expected of.

    Not every task has its score of the training data too. Test is a point, at the end: it stands where there is no validation.
    """
    is_trained = quantity == LOSS or any(quantity in line for run in runs for line in run.metrics)
    recorded = {key for run in runs for line in run.evaluations for key in line}
    only_tested = key_of("test", quantity) in recorded and key_of("validation", quantity) not in recorded
    looked_at: Part = "test" if only_tested else "validation"
    return ["training", looked_at] if is_trained else [looked_at]


def columns_of(runs: Sequence[PastRun]) -> tuple[X, ...]:
    """Return what several runs are drawn against: epochs, what all of them count, and time."""
    units = {run.unit for run in runs}
    columns = tuple(units.pop() if x == run_folder.UNIT and len(units) == 1 else x for x in XS)
    if len({_units_of_an_epoch(run) for run in runs}) > 1 or _units_of_an_epoch(runs[0]) is None:
        return columns
    left_out = columns[1] if columns[1] == run_folder.UNIT else "epoch"  # the same picture with other numbers below it
    return tuple(x for x in columns if x != left_out)


def _units_of_an_epoch(run: PastRun) -> float | None:
    """How many of what a run counts are in an epoch, to three digits, as its last line tells."""
    last = run.metrics[-1] if run.metrics else {}
    seen, samples, size = _number(last, f"{run.unit}_seen"), _number(last, "samples_seen"), run.samples_per_epoch
    return float(f"{size * seen / samples:.3g}") if size and seen and samples else None


def course_of(run: PastRun) -> X:
    """Return what one run is drawn against where there is one plot of each kind: epochs, or the unit of its task."""
    return "epoch" if run.unit == run_folder.UNIT else run.unit


def _epochs(run: PastRun, lines: Sequence[Line]) -> tuple[list[float | None], str]:
    size = run.samples_per_epoch
    if size and all(is_finite(line.get("samples_seen")) for line in lines):
        return [line["samples_seen"] / size for line in lines], ""
    note = f"{run.name}: how many samples an epoch has is not recorded; lines stand where their epoch begins."
    return [_number(line, "epoch") for line in lines], note


def _seen(run: PastRun, lines: Sequence[Line], what: str) -> tuple[list[float | None], str]:
    places = [_number(line, f"{what}_seen") for line in lines]
    return places, f"{run.name}: lines do not say how many {what} were seen." if None in places else ""


def _seconds(run: PastRun, lines: Sequence[Line]) -> tuple[list[float | None], str]:
    times = [_number(line, "time") for line in lines]
    begin_s = next((event.launched for event in run.events if isinstance(event, ledger.Start)), None)
    note = f"{run.name}: lines without a time are left out." if None in times else ""
    if begin_s is None:
        every = [_number(line, "time") for line in (*run.metrics, *run.evaluations)]
        begin_s = min((time for time in every if time is not None), default=0.0)
        note = f"{run.name}: when it was started is not recorded; its time begins with its first line."
    return [None if time is None else time - begin_s for time in times], note


def _number(line: Line, key: str) -> float | None:
    return float(line[key]) if is_finite(line.get(key)) else None


def labels(runs: Sequence[PastRun]) -> list[str]:
    """Return a name for each run, without the words that all share: 1x8 and 4x2 for digits-1x8-adamw and digits-4x2-adamw."""
    paths = [run.folder.resolve().parts for run in runs]
    depths = range(1, 1 + max(map(len, paths)))
    depth = next((depth for depth in depths if len({path[-depth:] for path in paths}) == len(runs)), 1)
    separator = r"([_/]|(?<!\de)-)"  # 1e-3 is one word
    words = [re.split(separator, "/".join(path[-depth:])) for path in paths]  # a word, what separates it, a word, ...
    for shared, rest in ((slice(2), slice(2, None)), (slice(-2, None), slice(-2))):
        while len(runs) > 1 and all(len(own) > 1 for own in words) and len({tuple(own[shared]) for own in words}) == 1:
            words = [own[rest] for own in words]
    names = ["".join(own) for own in words]
    return [
        f"{name} ({1 + names[:place].count(name)})" if names.count(name) > 1 else name  # a folder that was given twice
        for place, name in enumerate(names)
    ]


def draw(
    axes: Axes, runs: Sequence[PastRun], quantity: str, *, x: X = "epoch", parts: Sequence[Part] | None = None
) -> list[str]:
    """Draw the curves of the runs, with labels for a legend, and return the sentences about what is missing.

    `parts` are by default those that are expected of it.
    """
    parts = parts_of(runs, quantity) if parts is None else parts
    curves = [[_readable(run, curve(run, part, quantity, x=x)) for part in parts] for run in runs]
    drawn = [value for of_run in curves for found in of_run for value in found.y]
    in_percent = is_share(quantity, drawn)
    factor = 100.0 if in_percent else 1.0
    scale, x_label = _scale_of(runs, x)
    for number, (name, of_run) in enumerate(zip(labels(runs), curves, strict=True)):
        for part, found in zip(parts, of_run, strict=True):
            if not found.y:
                continue
            label = part if len(runs) == 1 else name if len(parts) == 1 else f"{name}, {part}"
            places, values = [place / scale for place in found.x], [factor * value for value in found.y]
            axes.plot(places, values, label=_as_text(label), **_style(number, part, len(values), alone=len(parts) == 1))
    axes.set_xlabel(x_label)
    axes.set_ylabel(f"{parts[0] + ' ' if len(parts) == 1 else ''}{words(quantity)}{' (%)' if in_percent else ''}")
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center")
    is_log = _falls(runs, quantity) and bool(drawn) and 0 < _LOG_FROM * min(drawn) < max(drawn)
    _set_scales(axes, x, labels=() if not is_log else (1,) if max(drawn) > _DECADES_FROM * min(drawn) else (1, 2, 5))
    return [note for of_run in curves for found in of_run for note in found.notes]


def _falls(runs: Sequence[PastRun], quantity: str) -> bool:
    """Whether less of it is better, so that what matters is at the lower end of its axis."""
    return quantity in (LOSS, *FOLLOWED) or any(run.monitor == (quantity, "min") for run in runs)


def _readable(run: PastRun, found: Curve) -> Curve:
    """The curve, of too many points to see a line the means of some after each other."""
    size = math.ceil(len(found.y) / _MOST_POINTS)
    if size <= 1:
        return found

    def means(values: Sequence[float]) -> list[float]:
        return [statistics.fmean(values[first : first + size]) for first in range(0, len(values), size)]

    note = f"{run.name}: {len(found.y):,} lines are drawn as points, each the mean of {size}."
    return Curve(x=means(found.x), y=means(found.y), notes=[*found.notes, note])


def _as_text(label: str) -> str:
    """The label with nothing in it that matplotlib takes for a formula, or for a line without a label."""
    return re.sub("^_", " _", label.replace("$", r"\$"))


def _scale_of(runs: Sequence[PastRun], x: X) -> tuple[float, str]:
    """What the places are divided by to be shown, and the label of the axis: the same in all panels of these runs."""
    if x != "time":
        return 1.0, "epoch" if x == "epoch" else f"{x} seen"
    last_s = max((curve(run, part, LOSS, x=x).x[-1:] or [0.0])[0] for run in runs for part in PARTS)
    seconds, unit = next((seconds, unit) for least_s, seconds, unit in _TIME_UNITS if last_s >= least_s)
    return seconds, f"time since the start ({unit})"


def _style(number: int, part: Part, points: int, *, alone: bool) -> dict[str, Any]:
    """How the line of a run is drawn; `alone`: only this part is drawn, so training lines are free to have markers too."""
    style: dict[str, Any] = {
        "linestyle": _LINES[(number + number // len(_MARKERS)) % len(_LINES)],
        "color": _COLOURS[number % len(_COLOURS)],
        "linewidth": max(0.9, 2.0 - 0.3 * number),
    }
    if part == "training" and not alone:
        dot = {"marker": ".", "markersize": 8.0} if points == 1 else {}  # a line of one point is not seen
        return {**style, **dot, "linewidth": 0.6 * style["linewidth"]}
    spacing = max(1, points // _MARKS)
    return {
        **style,
        "marker": _MARKERS[number % len(_MARKERS)],
        "markerfacecolor": "white",
        "markersize": max(4.0, 7.0 - 0.7 * number),
        "markevery": slice(number * spacing // 3 % spacing, None, spacing),  # those of runs that coincide stand side by side
    }


def _set_scales(axes: Axes, x: X, *, labels: Sequence[float]) -> None:
    """`labels` are those of each decade of a logarithmic axis; none: it is not one."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x == "epoch", min_n_ticks=2, steps=[1, 2, 5, 10]))
    if x not in ("epoch", "time"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if labels:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=labels))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0.0, auto=True)  # wide enough for what is still drawn in panels that share the axis
    axes.grid(visible=True, color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def page(
    runs: Sequence[PastRun], *, only: Sequence[str] | None = None, xs: Sequence[X] = ("epoch",)
) -> tuple[Figure, list[str]]:
    """Return a figure with a column for each of `xs`, and the sentences about what is missing.

    It has the loss and what the runs are judged by, or `only` these quantities. Of one run, training and test share a panel;
    of several, each has its own. One legend stands above all panels.
    """
    rows: list[tuple[str, Sequence[Part]]] = []
    for quantity in quantities(runs) if only is None else only:
        parts = parts_of(runs, quantity)
        rows += [(quantity, parts)] if len(runs) == 1 else [(quantity, [part]) for part in parts]
    figure = Figure(figsize=(max(7.0, 4.6 * len(xs)), 0.7 + 2.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(xs), sharex="col", sharey="row", squeeze=False)
    notes: list[str] = []
    for (quantity, own), places in zip(rows, grid, strict=True):
        for axes, x in zip(places, xs, strict=True):
            notes += draw(axes, runs, quantity, x=x, parts=own)
            axes.label_outer()
    entries = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if entries:
        title = _as_text(runs[0].name) if len(runs) == 1 else None
        look = {"loc": "outside upper center", "ncols": 4, "frameon": False, "handlelength": 4}
        figure.legend(entries.values(), entries.keys(), title=title, **look)
    return figure, list(dict.fromkeys(notes))
