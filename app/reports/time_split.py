"""Where the time went between one line of metrics and the next: the shares, over the course of a run, as a picture.

Seconds are those of the training loop, the mean of the ranks; evaluations and saves are those of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from app.record import ledger
from app.reports.past_run import PastRun

PARTS = ("forward and backward", "communication", "optimizer", "data wait", "evaluation", "saving", "other")
_SHARES = ("forward_backward_share", "communication_share", "optimizer_share", "data_wait_share")
_LOOKS = (("0.93", ""), ("0.55", ""), ("0.8", "//"), ("0.25", ""), ("1.0", "\\\\"), ("0.7", "xx"), ("1.0", ""))
_MOST_COLUMNS = 80
"""More could not be told apart in a picture as wide as a phone."""


def split(run: PastRun) -> list[tuple[int, list[float]]]:
    """Return, for each stretch of the run, its last step and the seconds of each of PARTS. No stretch is empty."""
    evaluated = [event for event in run.events if isinstance(event, ledger.Evaluated)]
    stretches: list[tuple[int, list[float]]] = []
    before: dict[str, Any] = {"step": 0, "training_s": 0.0}
    for line in run.metrics:
        training_s = line["training_s"] - before["training_s"]
        if training_s < 0:  # another start: its clock began anew
            training_s = line["training_s"]
        shares = [line.get(name) or 0.0 for name in _SHARES]
        held_s = sum(event.held_s for event in evaluated if before["step"] < event.step <= line["step"])
        seconds = [share * training_s for share in shares]
        seconds += [held_s, line.get("saving_held_s") or 0.0, max(0.0, 1.0 - sum(shares)) * training_s]
        before = dict(line)
        if sum(seconds) > 0:
            stretches.append((line["step"], seconds))
    return stretches


def merged(stretches: Sequence[tuple[int, list[float]]], most: int = _MOST_COLUMNS) -> list[tuple[int, list[float]]]:
    """Return at most so many stretches, of which each is several of the given ones taken together."""
    length = -(-len(stretches) // most) or 1
    groups = [stretches[start : start + length] for start in range(0, len(stretches), length)]
    return [
        (group[-1][0], [sum(column) for column in zip(*(seconds for _, seconds in group), strict=True)]) for group in groups
    ]


def draw(stretches: Sequence[tuple[int, list[float]]], *, size: tuple[float, float]) -> Figure:
    """Return a picture of the shares of each stretch, stacked, over the steps; `size` is its width and height in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    steps = [0] + [step for step, _ in stretches]
    bottoms = [0.0] * len(stretches)
    for part, name in enumerate(PARTS):
        shares = [seconds[part] / sum(seconds) for _, seconds in stretches]
        if max(shares) < 0.005:  # not to be seen
            continue
        tops = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
        colour, hatch = _LOOKS[part]
        axes.stairs(
            [100 * top for top in tops],
            steps,
            baseline=[100 * bottom for bottom in bottoms],
            fill=True,
            facecolor=colour,
            edgecolor="0.2",
            linewidth=0.5,
            hatch=hatch,
            label=name,
        )
        bottoms = tops
    axes.set(ylim=(0, 100), ylabel="share of the time (%)")
    count_steps(axes, steps[-1])
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def count_steps(axes: Axes, last_step: int) -> None:
    """Make the horizontal axis that of the steps up to `last_step`: 500k where there is no place for 500000."""
    axes.set(xlim=(0, last_step), xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=2, steps=[1, 2, 5, 10]))
    if last_step >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
