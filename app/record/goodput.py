"""Where the time of a run went, from its ledger: every second since it was submitted or launched is in exactly one part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from app.record.ledger import Evaluated, Event, Saved, Start, Steps, counting


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds of a run, up to the last line of its ledger, as the main process saw them."""

    queue_s: float | None = None
    """From submitting a job until it was allocated; None where no start knows it."""
    startup_s: float = 0.0
    """From the allocation, where it is known, or the launch of the main process until its training loop began.

    All of a start that took no step.
    """
    compute_s: float = 0.0
    """Steps that count in the end, without waiting for data."""
    data_wait_s: float = 0.0
    """Waiting for data in these steps."""
    evaluation_s: float = 0.0
    saving_s: float = 0.0
    """The loop stood still for a checkpoint; what is written in the background costs nothing."""
    lost_work_s: float = 0.0
    """Steps, evaluations and saves that a later start did again."""
    down_s: float = 0.0
    """From the last line of a start until the next was submitted, allocated or launched: who is killed cannot say when."""
    other_s: float = 0.0
    """Writing the result, and whatever no line tells of."""

    @property
    def wall_s(self) -> float:
        """The whole time, which is the sum of the parts."""
        return math.fsum(getattr(self, part.name) or 0.0 for part in fields(self))

    @property
    def share(self) -> float:
        """How much of the whole time was compute that counts, 0..1."""
        return self.compute_s / self.wall_s if self.wall_s else 0.0


def account(events: Sequence[Event]) -> TimeSpent:
    """Return where the time went of a run with these lines, of which the first is a start."""
    spent = dict.fromkeys((part.name for part in fields(TimeSpent)), 0.0)
    now: float | None = None
    for start, lines in _starts(events):
        now = _until_launched(start, now, spent)
        now = _until_last_line(start, lines, now, spent)
    all_work, counting_work = _work(events), _work(counting(events))
    spent |= counting_work
    spent["lost_work_s"] = sum(all_work.values()) - sum(counting_work.values())
    if all(event.submitted is None for event in events if isinstance(event, Start)):
        del spent["queue_s"]
    return TimeSpent(**spent)


def _starts(events: Sequence[Event]) -> list[tuple[Start, list[Event]]]:
    """Each start with the lines that follow it."""
    starts: list[tuple[Start, list[Event]]] = []
    for event in events:
        if isinstance(event, Start):
            starts.append((event, []))
        else:
            starts[-1][1].append(event)
    return starts


def _until_launched(start: Start, now: float | None, spent: dict[str, float]) -> float:
    """Spend the time from `now`, the end of the start before, and return when the main process was launched."""
    part = "down_s"
    for moment, next_part in ((start.submitted, "queue_s"), (start.allocated, "startup_s"), (start.launched, "startup_s")):
        if moment is None:
            continue
        now = moment if now is None else now
        if moment >= now:  # a later start in the same job was submitted and allocated long ago
            spent[part] += moment - now
            now, part = moment, next_part
    assert now is not None
    return now


def _until_last_line(start: Start, lines: Sequence[Event], launched: float, spent: dict[str, float]) -> float:
    """Spend what is not work of the time from the launch, and return when the last line was written."""
    end = max([launched, start.time, *(line.time for line in lines)])
    # The first line of steps tells of all work since the loop began: what is not work before it is start-up.
    first = next((number for number, line in enumerate(lines) if isinstance(line, Steps)), None)
    until, before = (end, lines) if first is None else (lines[first].time, lines[: first + 1])
    startup_s = max(0.0, until - launched - sum(map(_work_s, before)))
    spent["startup_s"] += startup_s
    spent["other_s"] += max(0.0, end - launched - startup_s - sum(map(_work_s, lines)))
    return end


def _work_s(event: Event) -> float:
    """The seconds of work that a line tells of."""
    return sum(_work([event]).values())


def _work(events: Sequence[Event]) -> dict[str, float]:
    """The seconds of work that the lines tell of, by their part."""
    steps = [event for event in events if isinstance(event, Steps)]
    return {
        "compute_s": sum(event.training_s - event.waiting_s for event in steps),
        "data_wait_s": sum(event.waiting_s for event in steps),
        "evaluation_s": sum(event.held_s for event in events if isinstance(event, Evaluated)),
        "saving_s": sum(event.held_s for event in events if isinstance(event, Saved)),
    }
