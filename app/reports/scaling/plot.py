"""The picture of a sweep: speed and efficiency over the number of devices, measured and by the fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from app.reports.scaling.advice import Advice
from app.reports.scaling.report import PLOT, Report


class _Style(NamedTuple):
    """How a method is told from the others, without colour."""

    marker: str
    line: str
    grey: str


_STYLES = [
    _Style(marker, line, grey)
    for marker, line, grey in (
        ("o", "-", "0.0"),
        ("s", "--", "0.35"),
        ("^", "-.", "0.2"),
        ("D", ":", "0.45"),
        ("v", "-", "0.55"),
    )
]
_INCHES = (10.5, 4.6)


def draw(folder: Path, report: Report) -> None:
    """Write scaling.pdf and scaling.png into the folder."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    speed, share = figure.subplots(1, 2)
    in_images = all(run.samples_per_s is not None for row in report.rows for run in row.runs)
    for number, advice in enumerate(report.advice):
        _draw_speed(speed, advice, _STYLES[number % len(_STYLES)], in_images=in_images)
        _draw_share(share, advice, _STYLES[number % len(_STYLES)])
    measured = sorted({row.devices for row in report.rows if row.runs})
    devices = [*measured, *(2 * number for number in measured[-1:])]
    for axes in (speed, share):
        _devices_axis(axes, devices)
    speed.set_yscale("log")
    speed.set_ylabel("images/s" if in_images else "speed-up over the smallest size")
    speed.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    speed.yaxis.set_minor_formatter(NullFormatter())
    share.set_ylabel("efficiency")
    share.set_ylim(0, min(max(1.1, share.get_ylim()[1]), 1.6))  # of an interval that tells nothing, the part that fits
    share.axhline(report.wanted, color="0.6", linewidth=0.9, linestyle=(0, (1, 2)), label=f"wanted: {report.wanted:.0%}")
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    if report.advice:
        speed.legend(fontsize=8, loc="upper left")
        share.legend(fontsize=8, loc="lower left")
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


def _curve(advice: Advice) -> np.ndarray:
    """Numbers of devices [points] to draw a fit over: up to twice the largest size."""
    return np.geomspace(advice.method.base.devices, 2 * advice.method.rows[-1].devices, 60)


def _draw_speed(axes: Axes, advice: Advice, style: _Style, *, in_images: bool) -> None:
    method, rows = advice.method, advice.method.rows
    # What a speed-up of 1 is on the axis.
    unit = (method.base.mean("samples_per_s") or 0.0) if in_images else 1.0
    devices = [row.devices for row in rows]
    rates = [unit * method.speed_up(row) for row in rows]
    deviations = [rate * (row.deviation("seconds") or 0.0) / row.seconds for rate, row in zip(rates, rows, strict=True)]
    axes.errorbar(
        devices, rates, yerr=deviations, fmt=style.marker, color=style.grey, capsize=3, markersize=5, label=method.name
    )
    span = np.array([devices[0], 2 * devices[-1]], dtype=np.float64)
    label = "ideal, from the smallest size" if style is _STYLES[0] else None
    axes.plot(span, rates[0] * span / devices[0], color="0.6", linewidth=0.9, linestyle=(0, (5, 4)), label=label, zorder=1)
    if advice.fit is None:
        return
    here = _curve(advice)
    low_s, high_s = advice.fit.between(here)
    rate = unit * method.base.seconds
    axes.plot(here, rate / advice.fit.seconds(here), style.line, color=style.grey, linewidth=1.2, label=f"{method.name}, fit")
    axes.fill_between(here, rate / high_s, rate / low_s, color=style.grey, alpha=0.15, linewidth=0, label="range of the fit")


def _draw_share(axes: Axes, advice: Advice, style: _Style) -> None:
    method, rows = advice.method, advice.method.rows
    shares = [method.efficiency(row) for row in rows]
    values = [share.value for share in shares]
    below = [0.0 if share.low is None else share.value - share.low for share in shares]
    above = [0.0 if share.high is None else share.high - share.value for share in shares]
    devices = [row.devices for row in rows]
    label = f"{method.name}, 95 % interval" if any(above) else method.name
    axes.errorbar(
        devices, values, yerr=[below, above], fmt=style.marker, color=style.grey, capsize=3, markersize=5, label=label
    )
    if advice.fit is None:
        return
    here = _curve(advice)
    share, low, high = advice.fit.efficiency(here, base=method.base.devices)
    axes.plot(here, share, style.line, color=style.grey, linewidth=1.2, label=f"{method.name}, fit")
    axes.fill_between(here, low, high, color=style.grey, alpha=0.15, linewidth=0, label="range of the fit")
