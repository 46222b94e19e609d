"""The picture of a plan: what each preset takes of a device, by kind, beside what the device has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.errors import UsageError
from app.planning.devices import GIB
from app.planning.plan import BLOCKS, Row
from app.planning.table import KINDS, NOT_CALIBRATED, Advice, Told, amount

# Told apart in grey by their lightness and hatch, in the order in which they stand in a bar.
_LOOKS = {
    "weights": ("#1a1a1a", ""), "gradients": ("#7a7a7a", ""), "optimizer": ("#b8b8b8", ""), "activations": ("#ffffff", "////"),
    "loss": ("#d9d9d9", "...."), "buffers": ("#555555", "xxxx"), "libraries": ("#f2f2f2", ""),
}  # fmt: skip
_OTHER = ("#ffffff", "++")
_MOST_SHOWN = 2.0
"""Of a bar, in memories of the device: longer ones are cut off, and say how long they are."""
_BAR_INCHES, _PANEL_INCHES = 0.28, 0.75


def draw(path: Path, told: Told) -> None:
    """Write the picture; its ending says of which kind. Raises UsageError for one that cannot be written."""
    chosen = [(advice, shown_rows(advice)) for advice in told.advice]
    chosen = [(advice, rows) for advice, rows in chosen if rows]
    heights = [_PANEL_INCHES + _BAR_INCHES * len(rows) for _, rows in chosen]
    figure = Figure(figsize=(9.0, sum(heights) + 1.0), layout="constrained")
    panels = figure.subplots(max(len(chosen), 1), 1, squeeze=False, sharex=True, height_ratios=heights or None)[:, 0]
    for axes, (advice, rows) in zip(panels, chosen, strict=False):
        _panel(axes, told, advice, rows)
    panels[-1].set_xlabel("GiB on each device, at the peak of a step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(
        f"{told.recipe}: {amount(told.parameters)} parameters, {told.precision} on {told.device.name}, {NOT_CALIBRATED}",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no kind of picture
        raise UsageError(f"--plot is {path}, which cannot be written: {error}") from error


def shown_rows(advice: Advice) -> list[Row]:
    """Return one row of each preset: the one that fits without computing blocks again, or else what takes the least."""
    found: dict[str, Row] = {}
    for row in advice.rows:
        before = found.get(row.way.preset)
        if row.memory is not None and (before is None or (not before.fits and _less(row, before))):
            found[row.way.preset] = row
    return list(found.values())


def _less(row: Row, before: Row) -> bool:
    assert row.memory is not None
    assert before.memory is not None
    return row.fits or row.memory.total < before.memory.total


def _panel(axes: Axes, told: Told, advice: Advice, rows: Sequence[Row]) -> None:
    most = _MOST_SHOWN * told.device.memory / GIB
    for place, row in enumerate(rows):
        assert row.memory is not None
        left = 0.0
        for kind in KINDS:
            size = getattr(row.memory, kind) / GIB
            colour, hatch = _LOOKS.get(kind, _OTHER)
            axes.barh(
                place, size, left=left, height=0.7, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5,
                label=kind if place == 0 else None,
            )  # fmt: skip
            left += size
        says = f"{left:,.0f}, micro-batch {row.micro_batch}"
        says += ", recomputed" if row.checkpoint_activations == BLOCKS else ""
        says += f"; host {row.host / GIB:,.0f} per node" if row.host else ""
        is_cut = left > 0.97 * most
        axes.text(
            most * 0.99 if is_cut else left + most * 0.01, place, says, va="center", ha="right" if is_cut else "left",
            fontsize=8, fontweight="bold" if row is advice.best else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    axes.axvline(told.device.memory / GIB, color="black", linewidth=1.4, linestyle=(0, (4, 2)))
    axes.axvline(told.usable / GIB, color="black", linewidth=1.0, linestyle=(0, (1, 2)))
    axes.set_xlim(0, most)
    axes.set_yticks(range(len(rows)), [row.way.preset for row in rows], fontsize=8)
    axes.invert_yaxis()
    nodes = rows[0].way.nodes
    where = f"{advice.devices} device{'s' if advice.devices > 1 else ''}" + (f" on {nodes} nodes" if nodes > 1 else "")
    axes.set_title(f"{where}; dashed: memory of {told.device.name}; dotted: the part planned with", fontsize=9, loc="left")
