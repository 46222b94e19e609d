"""A plan in words: the table of each number of devices, what is the cheapest there and why, and what all of it assumes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.planning.case import Memory
from app.planning.devices import GIB, Device
from app.planning.plan import BLOCKS, Duration, Row

KINDS = tuple(Memory().by_kind)
NOT_CALIBRATED = "not calibrated on a GPU"
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is said of one number of devices."""

    devices: int
    rows: Sequence[Row]
    best: Row | None
    command: str
    """What starts the best; empty: nothing fits."""

    @property
    def is_planned(self) -> bool:
        """Whether any preset can be planned on so many devices."""
        return any(row.memory is not None for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Told:
    """All that is told of a plan."""

    recipe: str
    parameters: int
    trained: int
    device: Device
    usable: int
    """Bytes of the device that may be planned."""
    host_memory: int | None
    """Bytes of a node's host; None: not known."""
    usable_host: int | None
    """Those of them that may be planned."""
    precision: str
    duration: Duration | None
    """None: nothing is known of what the device computes."""
    checkpoint_bytes: int
    disk_bytes_per_s: float
    advice: Sequence[Advice]
    notes: Sequence[str] = ()


def lines(told: Told) -> Iterator[str]:
    """Yield the lines of the whole plan."""
    yield (
        f"{told.recipe}: {amount(told.parameters)} parameters, mixed_precision {told.precision}, on {told.device.name} "
        f"({_gib(told.device.memory)} GiB each, {_gib(told.usable)} planned); {NOT_CALIBRATED}"
    )
    for advice in told.advice:
        yield ""
        yield from _table(told, advice)
        yield from _concluded(told, advice)
    yield ""
    seconds = told.checkpoint_bytes / told.disk_bytes_per_s
    yield (
        f"one checkpoint: {told.checkpoint_bytes / 1e9:,.1f} GB, {time_of(seconds)} at "
        f"{told.disk_bytes_per_s / 1e9:g} GB/s to disk (--disk-gb-s, assumed)"
    )
    yield (
        f"assumed: {told.usable / told.device.memory:.0%} of a device's memory is planned with "
        "(--memory-utilization); the rest is left for the CUDA context, NCCL and fragmentation"
    )
    yield from _assumed(told)
    if any(row.host for advice in told.advice for row in advice.rows):
        yield _of_host(told)
    yield from (f"note: {note}" for note in told.notes)


def _table(told: Told, advice: Advice) -> Iterator[str]:
    nodes = advice.rows[0].way.nodes if advice.rows else 1
    where = f"{advice.devices} device{'s' if advice.devices > 1 else ''}" + (f" on {nodes} nodes" if nodes > 1 else "")
    problems = list(dict.fromkeys(row.problem for row in advice.rows if row.problem))
    if not advice.is_planned:
        yield f"{where}  not possible: {'; '.join(problems) or 'no preset runs on this number of devices'}"
        return
    kinds = [kind for kind in KINDS if any(_gib(getattr(row.memory, kind, 0)) != _gib(0) for row in advice.rows)]
    host = ["host per node"] if any(row.host for row in advice.rows) else []
    head = [where, "recomputed", *kinds, "total", *host, "", "micro-batch", "sent per step"]
    body = [_cells(told, row, kinds, with_host=bool(host)) for row in advice.rows if row.memory is not None]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    for cells in (head, *body):
        words = [cells[0].ljust(widths[0]), cells[1].ljust(widths[1])]
        words += [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        yield "  ".join(words).rstrip()
    yield from (f"  {problem}" for problem in problems)


def _cells(told: Told, row: Row, kinds: Sequence[str], *, with_host: bool) -> list[str]:
    assert row.memory is not None
    sizes = [_gib(getattr(row.memory, kind)) for kind in kinds]
    host = [_gib(row.host) if row.host else "-"] if with_host else []
    fits = "fits" if row.fits else f"> {_gib(told.usable)}"
    if row.memory.total <= told.usable and row.lacks_host:
        fits = f"host > {_gib(told.usable_host or 0)}"
    sent = f"{row.traffic.total / 1e9:,.1f} GB" if row.traffic.total else "-"
    again = "yes" if row.checkpoint_activations == BLOCKS else "no"
    batch = f"{row.micro_batch} x {row.accumulation}"
    return [row.way.preset, again, *sizes, _gib(row.memory.total), *host, fits, batch, sent]


def _concluded(told: Told, advice: Advice) -> Iterator[str]:
    best = advice.best
    if not advice.is_planned:
        return
    if best is None:
        yield f"  nothing fits: {remedy(advice)}"
        return
    yield f"  cheapest: {best.way.preset}{_again(best)}, micro-batch {best.micro_batch}: {why(told, advice)}"
    if best.traffic.total:
        yield f"  {_sent(told, best)}"
    if told.duration is not None:
        step, total = told.duration.step_s(best), told.duration.total_s(best)
        whole = "" if total is None else f", {time_of(total)} for all {told.duration.steps:,} steps"
        yield f"  about {time_of(step)} per step{whole}"
    yield f"  {advice.command}"


def why(told: Told, advice: Advice) -> str:
    """Return why the cheapest is it: what sends less, or computes less, does not fit."""
    best = advice.best
    assert best is not None
    least: dict[str, int] = {}
    for row in advice.rows:
        is_too_large = row.memory is not None and row.memory.total > told.usable
        if row.memory is not None and is_too_large and row.checkpoint_activations == best.checkpoint_activations:
            least[row.way.preset] = row.memory.total
    if not least:
        return (
            "of the presets that fit, it shards the model least" if best.traffic.total else "one process needs no communication"
        )
    needs = ", ".join(f"{preset} needs {_gib(total)}" for preset, total in least.items())
    return f"{needs} GiB, of {_gib(told.usable)}"


def remedy(advice: Advice) -> str:
    """Return what to change where nothing fits."""
    smallest = min(
        (row for row in advice.rows if row.memory), key=lambda row: row.memory.total if row.memory else 0, default=None
    )
    if smallest is None or smallest.memory is None:
        return "; ".join(dict.fromkeys(row.problem for row in advice.rows if row.problem))
    least = f"the smallest is {smallest.way.preset}{_again(smallest)}, {_gib(smallest.memory.total)} GiB"
    if smallest.lacks_host:
        least += f", and {_gib(smallest.host)} GiB of a node's host memory"
        return f"{least}; take more nodes, nodes with more host memory, larger devices, or a smaller model"
    return f"{least}; take more devices, larger ones, or a smaller model"


def _of_host(told: Told) -> str:
    """What the column of the host's memory is held against, and what it leaves out."""
    left_out = "without Python, the libraries, the data and the rounding of pinned memory"
    if told.host_memory is None or told.usable_host is None:
        return (
            f"host per node: offloaded state only, {left_out}; whether it fits is not checked: give "
            "--host-memory, such as 512GiB"
        )
    share = f"{_gib(told.usable_host)} of {_gib(told.host_memory)} GiB are planned with (--host-memory, --memory-utilization)"
    return f"host per node: offloaded state only, {left_out}; {share}"


def _assumed(told: Told) -> Iterator[str]:
    if told.duration is None:
        yield f"the training time is unknown: give --device a name, which has known FLOP/s, not {told.device.name}"
        return
    yield (
        f"assumed: {told.duration.utilization:.0%} of {told.duration.peak / 1e12:,.0f} TFLOP/s per device "
        "(--mfu); recomputing blocks adds a third; communication is assumed to overlap with computing"
    )


def _sent(told: Told, row: Row) -> str:
    """What a process sends in a step, and how that is counted."""
    way, formula = row.way, row.traffic.formula
    meant = {
        "A": f"{row.accumulation} pass{'es' if row.accumulation > 1 else ''} per step",
        "N": f"{way.data_ranks} data-parallel processes",
        "D": f"{way.data_ranks // way.replicas} processes that share one copy of the model",
        "C": f"{way.replicas} copies",
        "t": f"{way.tensor_parallel} tensor-parallel processes",
        "e": f"{4 if told.precision == 'no' else 2} bytes",
        "P": f"{amount(told.trained)} trained parameters",
        "n": "tokens per pass",
        "H": "the model's width",
        "L": "the number of blocks",
    }
    letters = set(re.sub("[a-z]{2,}", "", formula))  # those of the formula, not those of its words
    where = ", ".join(f"{letter} = {meaning}" for letter, meaning in meant.items() if letter in letters)
    parts = f", {_apart(row)}" if row.traffic.between or row.traffic.host else ""
    return f"each process sends {row.traffic.total / 1e9:,.1f} GB per step{parts}: {formula}, with {where}"


def _apart(row: Row) -> str:
    parts = [f"{row.traffic.between / 1e9:,.1f} GB of it between nodes"] if row.traffic.between else []
    parts += [f"{row.traffic.host / 1e9:,.1f} GB to and from the host's memory"] if row.traffic.host else []
    return ", ".join(parts)


def _again(row: Row) -> str:
    return " with checkpoint_activations" if row.checkpoint_activations == BLOCKS else ""


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"


def amount(number: float) -> str:
    """Return a number as `1.3 B` or `125 M`."""
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def time_of(seconds: float) -> str:
    """Return a time with its unit: `3.2 s`, `4.0 h`, `12.5 days`."""
    for most, unit, name in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (2 * _DAY_S, 3600.0, "h")):
        if seconds < most:
            return f"{seconds / unit:.2g} {name}" if seconds < 10 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds / _DAY_S:,.1f} days"
