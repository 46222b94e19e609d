"""The ledger of a run, RUN/ledger.jsonl: which samples were fed in which step, over all starts, and where the time went.

One JSON object a line: what a killed start had written stays there.

    {"event": "start", ...}      a start of the run: from which step it goes on, and since when it waited
    {"event": "steps", ...}      consecutive steps, each with the digest of its samples
    {"event": "evaluated", ...}  the seconds that an evaluation took
    {"event": "saved", ...}      a checkpoint that was committed, and its seconds
    {"event": "end", ...}        the start came to an end of its own will

Every field has its meaning below. Steps are numbered from 1, times are Unix seconds. A step is on the disk here before a
checkpoint that contains it is committed. A start from step k makes all that was recorded of later steps lost work.
Standard library only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from app.data.order import GOLDEN64, MASK64, MIX_FIRST, MIX_SECOND
from app.errors import RunFolderError
from app.files.text_files import Lines
from app.runs.run_folder import LEDGER

# As int64, in which torch has no constant of 64 bits otherwise.
_INCREMENT, _FIRST, _SECOND = (value - 2**64 if value >= 2**63 else value for value in (GOLDEN64, MIX_FIRST, MIX_SECOND))


def _now() -> float:
    return round(time.time(), 3)


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of the run, written before its first step."""

    time: float = field(default_factory=_now)
    from_step: int
    """Steps that the checkpoint contains which this start goes on from; 0: none."""
    total_steps: int
    """Steps of the whole run, as this start knows them."""
    training_samples: int
    """Samples in the training data."""
    world_size: int
    """Processes."""
    preset: str | None
    resumed_from: str | None
    """The checkpoint's folder."""
    job: str | None
    """The scheduler's name of the job."""
    submitted: float | None
    """When the job was submitted."""
    allocated: float | None
    """When the job started, this time."""
    launched: float
    """When the main process started."""
    shuffled: bool = True
    """False for a mixture, whose samples are numbered in their order."""


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """Consecutive steps, all of which were fed. Those in `skipped` and `skipped_by_recipe` were not applied."""

    time: float = field(default_factory=_now)
    first: int
    last: int
    digests: tuple[str, ...]
    """For each step `digest` of its samples, summed modulo 2**64, in hexadecimal."""
    skipped: tuple[int, ...] = ()
    """Steps of which a gradient was not finite, or a spike."""
    skipped_by_recipe: tuple[int, ...] = ()
    """Steps of `train.skip_steps`, of which nothing was computed."""
    sources: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of a mixture: what each source contributes to each step, in tokens or whatever the samples count, or else in samples."""
    training_s: float
    """Time spent since the line of steps before, or since the loop began, without evaluations and saves."""
    waiting_s: float
    """Part of it in which the main process waited for data."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last == self.first + len(self.digests) - 1:
            raise ValueError(f"steps {self.first} to {self.last} have {len(self.digests)} digests")
        if any(len(counts) != len(self.digests) for counts in dict(self.sources).values()):
            raise ValueError(f"steps {self.first} to {self.last} lack counts of a source")


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluation of the weights after `step` steps."""

    time: float = field(default_factory=_now)
    step: int
    held_s: float
    """Time that the training stood still for it."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint of the state after `step` steps that can be resumed."""

    time: float = field(default_factory=_now)
    step: int
    held_s: float
    """Time that the training stood still for it."""
    written_s: float
    """Time from its begin until it was committed."""


@dataclass(frozen=True, kw_only=True)
class End:
    """A start that ended as it wanted to; one that was killed or failed has no such line."""

    time: float = field(default_factory=_now)
    step: int
    """Steps taken so far, over all starts."""
    outcome: str
    """`finished`, or `stopped` before the last step."""


Event = Start | StepSpan | Evaluated | Saved | End
_KINDS: dict[str, type[Event]] = {"start": Start, "steps": StepSpan, "evaluated": Evaluated, "saved": Saved, "end": End}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def digest(samples: Any) -> Any:
    """Return numbers int64 [...] that stand for sample numbers int64 [..., samples], an array or a tensor of any device.

    Sums, modulo 2**64, of the samples' hashes: the order does not matter, so shares can be added up in any way, and two
    lists that differ have the same sum with a chance of about 2**-64. The hash is like mix64 of app/data/order.py, with
    int64's arithmetic shifts, which PyTorch has.
    """
    mixed = (samples + _INCREMENT) * _FIRST
    mixed = (mixed ^ (mixed >> 32)) * _SECOND
    return (mixed ^ (mixed >> 29)).sum(-1)


def as_text(number: int) -> str:
    """Return a digest as it stands in the ledger: 16 hexadecimal digits, since JSON has no 64-bit integers."""
    return f"{number & MASK64:016x}"


def line(event: Event) -> dict[str, Any]:
    """Return an event as its line of the ledger has it."""
    return {"event": _NAMES[type(event)], **vars(event)}


def read(run_dir: Path) -> tuple[list[Event], str | None]:
    """Return the ledger's events, the oldest first, and a sentence on the lines that are left out, if there are broken ones.

    Raises RunFolderError if it is missing or cannot be read.
    """
    path = run_dir / LEDGER
    if not path.exists():
        raise RunFolderError(f"{path} is missing: {run_dir} is not the folder of a run that took a step.")
    lines, events = Lines(path), list[Event]()
    for number, _, values in lines:
        try:
            events.append(_event(values))
        except ValueError as error:
            lines.leave_out(number, str(error))
    return events, lines.complaint


def _event(values: dict[str, Any]) -> Event:
    """Return the event of a line. Raises ValueError."""
    kind = _KINDS.get(str(values.pop("event", "")))
    if kind is None:
        raise ValueError(f"it is none of the events {', '.join(_KINDS)}")
    arguments: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"it is no event {kind.__name__}: {error}") from None


def counting(events: Iterable[Event]) -> list[Event]:
    """Return the events that count in the end, without the steps that a later start repeated."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            kept = [part for one in kept if (part := _upto(one, event.from_step)) is not None]
        kept.append(event)
    return kept


def _upto(event: Event, step: int) -> Event | None:
    """Return the part of an event up to a step."""
    if isinstance(event, StepSpan) and event.first <= step < event.last:
        num_steps = step - event.first + 1
        share = num_steps / len(event.digests)
        return replace(
            event,
            last=step,
            digests=event.digests[:num_steps],
            skipped=tuple(skipped for skipped in event.skipped if skipped <= step),
            skipped_by_recipe=tuple(skipped for skipped in event.skipped_by_recipe if skipped <= step),
            sources={name: counts[:num_steps] for name, counts in event.sources.items()},
            training_s=event.training_s * share,
            waiting_s=event.waiting_s * share,
        )
    return event if last_step(event) <= step else None


def last_step(event: Event) -> int:
    """Return how many steps of the run had been taken, as far as an event tells."""
    if isinstance(event, Start):
        return event.from_step
    return event.last if isinstance(event, StepSpan) else event.step


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds of a run, up to the last line of its ledger, as the main process saw them."""

    queue_s: float | None = None
    """Time from submitting a job until it was allocated; None if no attempt knows it."""
    startup_s: float = 0.0
    """Time from the allocation, where it is known, or the launch of the main process until its training loop began.

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
    """Time from the last line of an attempt until the next was submitted, allocated or launched: who is killed cannot say
    when."""
    other_s: float = 0.0
    """Writing the result, and whatever no line tells of."""

    @property
    def wall_s(self) -> float:
        """The whole time, which is the sum of the parts."""
        return math.fsum(getattr(self, part.name) or 0.0 for part in fields(self))

    @property
    def share(self) -> float:
        """Share of the whole time that was compute that counts, 0..1."""
        return self.compute_s / self.wall_s if self.wall_s else 0.0


def account(events: Sequence[Event]) -> TimeSpent:
    """Return where the time went of a run with these lines, of which the first is a start."""
    spent = dict.fromkeys((part.name for part in fields(TimeSpent)), 0.0)
    places = [place for place, event in enumerate(events) if isinstance(event, Start)]
    now_s: float | None = None
    for place, following in zip(places, [*places[1:], len(events)], strict=True):
        start, lines = events[place], events[place + 1 : following]
        assert isinstance(start, Start)
        part = "down_s"
        for moment, next_part in ((start.submitted, "queue_s"), (start.allocated, "startup_s"), (start.launched, "startup_s")):
            if moment is not None and (now_s is None or moment >= now_s):  # one job may have several starts
                spent[part] += moment - (moment if now_s is None else now_s)
                now_s, part = moment, next_part
        assert now_s is not None
        launched_s = now_s
        now_s = max([launched_s, start.time, *(line.time for line in lines)])
        # The first line of steps covers all work since the loop began: everything else before it is start-up.
        first = next((number for number, line in enumerate(lines) if isinstance(line, StepSpan)), None)
        end_s, before = (now_s, lines) if first is None else (lines[first].time, lines[: first + 1])
        startup_s = max(0.0, end_s - launched_s - sum(_work(before).values()))
        spent["startup_s"] += startup_s
        spent["other_s"] += max(0.0, now_s - launched_s - startup_s - sum(_work(lines).values()))
    all_work, counting_work = _work(events), _work(counting(events))
    spent |= counting_work
    spent["lost_work_s"] = sum(all_work.values()) - sum(counting_work.values())
    if all(event.submitted is None for event in events if isinstance(event, Start)):
        del spent["queue_s"]
    return TimeSpent(**spent)


def _work(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of work in the lines, by their part."""
    steps = [event for event in events if isinstance(event, StepSpan)]
    return {
        "compute_s": sum(event.training_s - event.waiting_s for event in steps),
        "data_wait_s": sum(event.waiting_s for event in steps),
        "evaluation_s": sum(event.held_s for event in events if isinstance(event, Evaluated)),
        "saving_s": sum(event.held_s for event in events if isinstance(event, Saved)),
    }
