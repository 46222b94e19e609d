"""What a profile says, in a few lines: what overlaps, what is exposed, where each rank's time goes, and which rank is late.

The late rank is the one for which the others stand still. In a collective, they do from their own coming, or from when they had
nothing else to do, until the last one comes: that time counts against the last. A rank is called late if what counts against it
stands out from every other's, over the steps, by more than twice its standard error and by more than the clocks' error, and is
more than a hundredth of the step. Standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from app.profiling.account import PARTS
from app.profiling.rank_file import Header

_SHOWN_RANKS = 16
_SHOWN_OPERATIONS = 5
_LEAST_SHARE = 0.01
_PHASES = {"compute": "forward and backward", "optimizer": "the optimizer's step", "copies": "copies to and from the host",
           "data_wait": "waiting for data", "other": "everything else"}  # fmt: skip


@dataclass
class Lateness:
    """What counts against one rank."""

    waited_us: dict[int, float]
    """By step: how long the others, on average, stood still for it."""
    last_in: int = 0
    """Collectives that it was the last to enter."""


def lines(headers: Sequence[Header]) -> list[str]:
    """Return the summary of these ranks, in their order; at least one."""
    first = headers[0]
    steps = len(first.steps)
    step_us = statistics.fmean(sum(header.parts_us.values()) for header in headers) / steps
    hosts = ", ".join(dict.fromkeys(header.host for header in headers))
    count = f"{first.world_size} process{'es' if first.world_size > 1 else ''}"
    return [
        f"profile of steps {first.steps[0]} to {first.steps[-1]}: {count} on {hosts} ({first.strategy}), {_ms(step_us)} a step",
        *_communication(headers, steps, step_us),
        *_table(headers, steps),
        *_late(headers, steps, step_us),
        *_operations(headers, steps),
        *_clocks(headers),
    ]


def _communication(headers: Sequence[Header], steps: int, step_us: float) -> list[str]:
    outstanding = statistics.fmean(header.outstanding_us for header in headers) / steps
    exposed = statistics.fmean(header.parts_us["communication"] for header in headers) / steps
    if outstanding == 0 and headers[0].world_size == 1:
        return ["communication: none, because there is one process"]
    if outstanding == 0:
        return ["communication: no collective operation was recorded in these steps"]
    number = len(headers[0].collectives) / steps
    return [
        f"communication, mean of the ranks: {number:.3g} collectives a step are under way for {_ms(outstanding)} of it; "
        f"{1 - exposed / outstanding:.0%} of that is hidden behind other work, {_ms(exposed)} is exposed "
        f"({exposed / step_us:.0%} of the step)"
    ]


def _table(headers: Sequence[Header], steps: int) -> list[str]:
    shown = list(headers)
    if len(shown) > _SHOWN_RANKS:  # the extremes: who is late waits least
        by_wait = sorted(shown, key=lambda header: header.parts_us["communication"])
        shown = by_wait[: _SHOWN_RANKS // 2] + by_wait[-_SHOWN_RANKS // 2 :]
    width = max(len(header.name) for header in shown)
    parts = [part for part in PARTS if part != "copies" or any(header.parts_us[part] for header in headers)]  # a CPU has none
    rows = [f"{'a step, in ms':{width}}  " + "  ".join(f"{part.replace('_', ' '):>13}" for part in parts)]
    for header in shown:
        total_us = sum(header.parts_us.values())
        cells = [f"{header.parts_us[part] / steps / 1000:.2f} ({header.parts_us[part] / total_us:.0%})" for part in parts]
        rows.append(f"{header.name:{width}}  " + "  ".join(f"{cell:>13}" for cell in cells))
    if len(shown) < len(headers):
        rows.append(f"(of {len(headers)} ranks those that wait least and most)")
    return rows


def lateness(headers: Sequence[Header]) -> tuple[dict[int, Lateness], int]:
    """Return what counts against each rank, and the number of collectives that all ranks took part in."""
    found = {header.rank: Lateness(dict.fromkeys(header.steps, 0.0)) for header in headers}
    meetings: dict[tuple[int, str, int], dict[int, tuple[float, float, float]]] = defaultdict(dict)
    for header in headers:
        for step, name, number, begin_us, end_us, exposed_us in header.collectives:
            meetings[step, name, number][header.rank] = (begin_us, end_us, exposed_us)
    complete = {key: ranks for key, ranks in meetings.items() if len(ranks) == len(headers)}
    error_us = max(header.clock_error_us for header in headers)
    for (step, _, _), ranks in complete.items():
        last = max(ranks, key=lambda rank: ranks[rank][0])
        all_there_us = ranks[last][0]
        waited_us = [_waited_us(one, all_there_us, error_us) for rank, one in ranks.items() if rank != last]
        found[last].waited_us[step] += statistics.fmean(waited_us)
        found[last].last_in += 1
    return found, len(complete)


def _waited_us(one: tuple[float, float, float], all_there_us: float, error_us: float) -> float:
    """How long a rank stood still until all were there; it did from some moment on, up to the end."""
    _, end_us, exposed_us = one
    if end_us + error_us < all_there_us:  # a broadcast waits for its source alone
        return 0.0
    return min(exposed_us, max(0.0, all_there_us - (end_us - exposed_us)))


def _late(headers: Sequence[Header], steps: int, step_us: float) -> list[str]:
    if len(headers) == 1:
        return []
    found, number = lateness(headers)
    if not number:
        return ["late: unknown, because no collective operation of all ranks was recorded"]
    by_wait = sorted(found, key=lambda rank: -sum(found[rank].waited_us.values()))
    worst, next_worst = found[by_wait[0]], found[by_wait[1]]
    excess_us = [worst.waited_us[step] - next_worst.waited_us.get(step, 0.0) for step in worst.waited_us]
    waited_us, mean_us = statistics.fmean(worst.waited_us.values()), statistics.fmean(excess_us)
    noise_us = 2 * statistics.stdev(excess_us) / math.sqrt(steps) if steps > 2 else math.inf
    noise_us = max(noise_us, *(header.clock_error_us for header in headers), _LEAST_SHARE * step_us)
    if mean_us <= noise_us:
        why = (
            f"{_ms(mean_us)} more than for any other, with a noise of {_ms(noise_us)}" if steps > 2 else "too few steps to tell"
        )
        return [f"late: no rank; the others wait most for rank {by_wait[0]}, {_ms(waited_us)} of each step ({why})"]
    (late,) = [header for header in headers if header.rank == by_wait[0]]
    more_us, part = max((_excess_us(late, headers, part) / steps, part) for part in _PHASES)
    spends = f"; it spends {_ms(more_us)} more than they do on {_PHASES[part]}" if more_us > noise_us else ""
    return [
        f"late: {late.name}: it is the last to enter {worst.last_in} of {number} collectives, and the others wait for "
        f"it {_ms(waited_us)} of each step ({waited_us / step_us:.0%}){spends}"
    ]


def _excess_us(late: Header, headers: Sequence[Header], part: str) -> float:
    return late.parts_us[part] - statistics.fmean(one.parts_us[part] for one in headers if one is not late)


def _operations(headers: Sequence[Header], steps: int) -> list[str]:
    time_us, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for header in headers:
        for name, own_us, count in header.operations:
            time_us[name] += own_us / len(headers) / steps
            counts[name] += count
    most = sorted(time_us, key=lambda name: -time_us[name])[:_SHOWN_OPERATIONS]
    listed = [f"  {_ms(time_us[name]):>9}  {name[:80]} x{counts[name] / len(headers) / steps:.3g}" for name in most]
    return ["most expensive operations, own time per step, mean of the ranks:", *listed] if most else []


def _clocks(headers: Sequence[Header]) -> list[str]:
    error_us = max(header.clock_error_us for header in headers)
    if len({header.host for header in headers}) == 1:
        return []
    return [f"clocks: those of other hosts than {headers[0].host}'s are known to {_ms(error_us)}"]


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.2f} ms"
