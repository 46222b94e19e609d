"""The picture of a sweep: speed and efficiency over the number of devices, measured and by the fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from app.scaling.advice import Advice
from app.scaling.figures import Row
from app.scaling.fit import Array
from app.scaling.report import PLOT, Report


class _Style(NamedTuple):
    """How a method is told from the others, without colour."""

    marker: str
    line: Any
    grey: str
    hatch: str
    """Of the range of its fit."""


_STYLES = (
    _Style("o", "-", "0.0", "////"),
    _Style("s", "--", "0.35", "\\\\\\\\"),
    _Style("^", "-.", "0.2", "...."),
    _Style("D", ":", "0.45", "||||"),
    _Style("v", (0, (8, 2, 1, 2, 1, 2)), "0.55", "----"),
)
_INCHES, _LEGEND_LINE_INCHES = (10.5, 4.6), 0.2
_APART = 1.04
"""Factor between the markers of two methods on the same number of devices, or one would hide the other."""
_MOST_TOLD = 3.0
"""Times its lower end: how far the range of an efficiency goes at twice the largest size. A wider one would tell nothing."""
_MOST_SHOWN = 1.6
"""Of an efficiency: its interval may go far beyond where two runs tell nothing."""


def draw(folder: Path, report: Report) -> None:
    """Write scaling.pdf and scaling.png into the folder."""
    height = _INCHES[1] + 2 * _LEGEND_LINE_INCHES * len(report.advice)
    figure = Figure(figsize=(_INCHES[0], height), layout="constrained")
    speed, share = figure.subplots(1, 2)
    with_rates = all(run.units_per_s is not None for row in report.rows for run in row.runs)
    for number, advice in enumerate(report.advice):
        style, shift = _STYLES[number % len(_STYLES)], _APART ** (number - (len(report.advice) - 1) / 2)
        _draw_speed(speed, advice, style, shift=shift, with_rates=with_rates)
        _draw_share(share, advice, style, shift=shift)
    measured = sorted({row.devices for row in report.rows if row.runs})
    devices = [*measured, *(2 * number for number in measured[-1:])]
    for axes in (speed, share):
        _devices_axis(axes, devices)
    speed.set_yscale("log")
    speed.set_ylabel(f"{report.unit}/s" if with_rates else "speed-up over the smallest size")
    low, high = speed.get_ylim()
    speed.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    speed.yaxis.set_minor_formatter(NullFormatter())
    share.set_ylabel("efficiency")
    share.set_ylim(0, min(max(1.1, share.get_ylim()[1]), _MOST_SHOWN))
    share.axhline(report.wanted, color="0.6", linewidth=0.9, linestyle=(0, (1, 2)), label=f"wanted: {report.wanted:.0%}")
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    if report.advice:
        for axes in (speed, share):
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    figure.suptitle(report.title, fontsize=10)
    for ending in ("png", "pdf"):
        figure.savefig(folder / f"{PLOT}.{ending}", dpi=150)


def _devices_axis(axes: Axes, devices: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_xticks(devices, [str(number) for number in devices])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(advice: Advice) -> Array:
    """Numbers of devices [points] to draw a fit over: up to twice the largest size."""
    return np.geomspace(advice.method.base.devices, 2 * advice.method.rows[-1].devices, 60)


def _draw_speed(axes: Axes, advice: Advice, style: _Style, *, shift: float, with_rates: bool) -> None:
    method, rows = advice.method, advice.method.rows
    # What a speed-up of 1 is on the axis.
    unit = (method.base.mean("units_per_s") or 0.0) if with_rates else 1.0
    rates = [unit * method.speed_up(row) for row in rows]
    deviations = [rate * (row.deviation("seconds") or 0.0) / row.seconds for rate, row in zip(rates, rows, strict=True)]
    label = f"{method.name}, deviation" if any(deviations) else method.name
    _draw_points(axes, rows, np.array([rates, deviations, deviations]), style, shift=shift, label=label)
    span = np.array([rows[0].devices, 2 * rows[-1].devices], dtype=np.float64)
    ideal = "ideal, from the smallest size" if style is _STYLES[0] else None
    axes.plot(span, rates[0] * span / span[0], color="0.6", linewidth=0.9, linestyle=(0, (5, 4)), label=ideal, zorder=1)
    here = _curve(advice)
    if advice.fit is None:
        _say_too_few(axes, method.name, "a fit")
    else:
        rate = unit * method.base.seconds
        low_s, high_s = advice.fit.between(here)
        curves = (rate / advice.fit.seconds(here), rate / high_s, rate / low_s)
        _draw_fit(axes, here, curves, style, method.name, is_told=_is_told(advice))


def _draw_share(axes: Axes, advice: Advice, style: _Style, *, shift: float) -> None:
    method, rows = advice.method, advice.method.rows
    shares = [method.efficiency(row) for row in rows]
    values = [share.value for share in shares]
    below = [0.0 if share.low is None else share.value - share.low for share in shares]
    above = [0.0 if share.high is None else share.high - share.value for share in shares]
    label = f"{method.name}, 95 % interval" if any(above) else method.name
    _draw_points(axes, rows, np.array([values, below, above]), style, shift=shift, label=label)
    here = _curve(advice)
    if advice.fit is None:
        _say_too_few(axes, method.name, "a fit")
    else:
        curves = advice.fit.efficiency(here, base=method.base.devices)
        _draw_fit(axes, here, curves, style, method.name, is_told=_is_told(advice))


def _draw_points(axes: Axes, rows: Sequence[Row], points: Array, style: _Style, *, shift: float, label: str) -> None:
    """`points` [3, rows] are values, and how far their bars go below and above. Those of several nodes are hollow."""
    for on_several, face, suffix in ((False, style.grey, ""), (True, "white", ", several nodes")):
        which = [number for number, row in enumerate(rows) if ((row.nodes or 1) > 1) == on_several]
        if not which:
            continue
        devices = [rows[number].devices * shift for number in which]
        values, below, above = points[:, which]
        bars = axes.errorbar(devices, values, yerr=[below, above], fmt=style.marker, color=style.grey, capsize=3, elinewidth=1)
        bars[0].set(markersize=5, markerfacecolor=face, zorder=3)
        bars.set_label(label + suffix)


def _is_told(advice: Advice) -> bool:
    """Whether the sizes that were measured tell from what to what the efficiency of larger ones may be."""
    assert advice.fit is not None
    _, low, high = advice.fit.efficiency(_curve(advice)[-1:], base=advice.method.base.devices)
    return float(high[0]) <= _MOST_TOLD * float(low[0])


def _say_too_few(axes: Axes, name: str, what: str) -> None:
    """Say so in the legend, where a band would be explained."""
    axes.plot([], [], linestyle="none", label=f"{name}: too few sizes for {what}")


def _draw_fit(
    axes: Axes, devices: Array, curves: tuple[Array, Array, Array], style: _Style, name: str, *, is_told: bool
) -> None:
    """`curves` [points] are the fit, and from what to what it may be, which is drawn if it `is_told`."""
    middle, low, high = curves
    axes.plot(devices, middle, linestyle=style.line, color=style.grey, linewidth=1.3, label=f"{name}, fit")
    if not is_told:
        _say_too_few(axes, name, "a range of the fit")
        return
    band = axes.fill_between(devices, low, high, facecolor="none", edgecolor="0.75", hatch=style.hatch, linewidth=0.5)
    band.set(label=f"{name}, range of the fit", zorder=0)
