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

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from app.data.hash64 import GOLDEN64, MASK64, MIX_FIRST, MIX_SECOND
from app.errors import RunFolderError
from app.files.lines import Lines, is_count, is_finite
from app.record.run_folder import LEDGER

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


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Consecutive steps. All of them were fed; those in `skipped` were not applied: a gradient was not finite, or a spike."""

    time: float = field(default_factory=_now)
    first: int
    last: int
    digests: tuple[str, ...]
    """Of the samples of each step: what `digest` returns for them, summed modulo 2**64, in hexadecimal."""
    skipped: tuple[int, ...] = ()
    """The steps of which nothing was applied."""
    training_s: float
    """Time spent since the line of steps before, or since the loop began, without evaluations and saves."""
    waiting_s: float
    """How much of it the main process waited for data."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last == self.first + len(self.digests) - 1:
            raise ValueError(f"steps {self.first} to {self.last} have {len(self.digests)} digests")


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


Event = Start | Steps | Evaluated | Saved | End
_KINDS: dict[str, type[Event]] = {"start": Start, "steps": Steps, "evaluated": Evaluated, "saved": Saved, "end": End}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def digest(samples: Any) -> Any:
    """Return numbers int64 [...] that stand for sample numbers int64 [..., samples], an array or a tensor of any device.

    Sums, modulo 2**64, of the samples' hashes: the order does not matter, so shares can be added up in any way, and two
    lists that differ have the same sum with a chance of about 2**-64. The hash is like mix64 of app/data/hash64.py, with
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
    """The event of a line. Raises ValueError."""
    kind = _KINDS.get(str(values.pop("event", "")))
    if kind is None:
        raise ValueError(f"it is none of the events {', '.join(_KINDS)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    types = {field.name: str(field.type) for field in fields(kind)}
    if types.keys() != values.keys():
        raise ValueError(f"missing or unknown: {', '.join(sorted(types.keys() ^ values.keys()))}")
    for name, value in values.items():
        if not _is_of(value, types[name]):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not {types[name]}")
    return kind(**values)


def _is_of(value: Any, annotation: str) -> bool:
    """Whether a value is of a type as the classes above write it: `int`, `float`, `str`, `... | None`, `tuple[..., ...]`."""
    plain = annotation.removesuffix(" | None")
    if value is None:
        return plain != annotation
    if plain.startswith("tuple["):
        part = plain.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, tuple) and all(_is_of(item, part) for item in value)
    return {"int": is_count, "float": is_finite}.get(plain, lambda text: isinstance(text, str))(value)


def counting(events: Iterable[Event]) -> list[Event]:
    """Return what counts in the end: the events without those of steps that a later start took again."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            kept = [part for one in kept if (part := _upto(one, event.from_step)) is not None]
        kept.append(event)
    return kept


def _upto(event: Event, step: int) -> Event | None:
    """What is left of an event if nothing after a step counts."""
    if isinstance(event, Steps) and event.first <= step < event.last:
        num_steps = step - event.first + 1
        share = num_steps / len(event.digests)
        return replace(
            event,
            last=step,
            digests=event.digests[:num_steps],
            skipped=tuple(skipped for skipped in event.skipped if skipped <= step),
            training_s=event.training_s * share,
            waiting_s=event.waiting_s * share,
        )
    return event if last_step(event) <= step else None


def last_step(event: Event) -> int:
    """Return how many steps of the run had been taken, as far as an event tells."""
    if isinstance(event, Start):
        return event.from_step
    return event.last if isinstance(event, Steps) else event.step
