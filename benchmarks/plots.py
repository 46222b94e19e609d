"""The picture of `python -m benchmarks`: what share of the limit's speed each program reaches, with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import LIMIT, Result

_BAR_INCHES, _WIDTH_INCHES = 0.27, 8.0
_OURS, _OTHERS = "0.5", "0.8"  # greys, which any printer and any eye tells apart
_HATCH = "///"


def draw(found: Sequence[Result], stem: Path) -> None:
    """Write `stem`.png and `stem`.pdf: a panel for each group, a bar for each program, whiskers at the quartiles."""
    groups = list(dict.fromkeys(result.group for result in found))
    panels = [[result for result in found if result.group == group] for group in groups]
    heights = [len(panel) * _BAR_INCHES + 0.75 for panel in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.35), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for place, panel in zip(axes, panels, strict=True):
        _panel(place, panel)
    axes[-1].set_xlabel(f"speed as a share of the limit ({LIMIT}), by CPU time a step; whiskers: quartiles", fontsize=8)
    for ending in ("png", "pdf"):
        figure.savefig(stem.with_suffix(f".{ending}"), dpi=150)


def _panel(axes: Axes, panel: Sequence[Result]) -> None:
    positions = range(len(panel))
    medians = [result.ratio.median for result in panel]
    errors = [
        [result.ratio.median - result.ratio.low for result in panel],
        [result.ratio.high - result.ratio.median for result in panel],
    ]
    ours = [result.program.startswith("samerun") for result in panel]
    bars = axes.barh(
        positions,
        medians,
        xerr=errors,
        color=[_OURS if own else _OTHERS for own in ours],
        error_kw={"elinewidth": 1.2, "capsize": 2.5, "ecolor": "black"},
    )
    for bar, result in zip(bars, panel, strict=True):
        if result.program == LIMIT:
            bar.set_hatch(_HATCH)
        text = f"{result.ratio.median:.2f}   {result.cpu_us.median:,.0f} us"
        middle = bar.get_y() + bar.get_height() / 2
        axes.annotate(
            text,
            (result.ratio.high, middle),
            xytext=(6, 0),  # in points, so that the whisker's end is never covered, whatever the scale
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the dashed line
        )
    axes.set_yticks(positions, [result.program for result in panel], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, max(1.0, *(result.ratio.high for result in panel), axes.get_xlim()[1] / 1.3) * 1.3)
    axes.set_title(str(panel[0].group), loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
