"""The events of one rank as lines of a Chrome trace, on the common time axis.

Processes are ranks (`pid` is the rank and 1: 0 is the idle process to some viewers), threads and streams are lanes whose `tid`
is unique over all ranks, times are microseconds since the recording began. Collective operations of the CPU have lanes of
their own: they begin on one thread and end on another, and may overlap. The format is "Trace Event Format" (Google,
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Standard library only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.profiling.account import Collective
from app.profiling.raw import Arrow, Event, Lane
from app.ranks.clocks import Axis

_LANES = 1000
"""Threads and streams that a rank may have."""
_ARROWS = 1 << 32
"""Arrows that a rank may have."""
_NOISE = {"External id", "Record function id", "Ev Idx"}
"""Arguments that number the events for the profiler itself: a third of the file."""


class TraceLines:
    """The lines of one rank."""

    def __init__(self, rank: int, axis: Axis) -> None:
        self._rank, self._axis = rank, axis
        self._lanes: dict[Lane, int] = {}
        self.texts: list[str] = []
        """An event each, as JSON."""

    def add(self, event: Event) -> None:
        """Add an event on its thread or stream."""
        arguments = {name: value for name, value in event.arguments.items() if name not in _NOISE}
        self._add(event, event.lane, event.kind, arguments)

    def _add(self, event: Event, lane: Lane, kind: str, arguments: Mapping[str, Any]) -> None:
        begin_ns, end_ns = self._axis.common_ns(event.begin_ns), self._axis.common_ns(event.end_ns)
        span = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
        self._put("X", event.name, self._lane(lane), cat=kind, **span, args=arguments)

    def add_collectives(self, events: Iterable[Event], counted: Sequence[Collective]) -> None:
        """Add the collective operations of the CPU; those of a step say which they are."""
        facts = {
            id(one.event): {"step": one.step, "number": one.number, "exposed_us": one.exposed_ns / 1000} for one in counted
        }
        ends: list[int] = []
        for event in sorted(events, key=lambda event: event.begin_ns):
            free = next((lane for lane, end_ns in enumerate(ends) if end_ns <= event.begin_ns), len(ends))
            ends[free : free + 1] = [event.end_ns]
            self._add(event, ("collectives", free, False), "collective", facts.get(id(event), {}))

    def add_arrows(self, arrows: Iterable[Arrow]) -> None:
        """Add the arrows of which both ends were recorded."""
        pairs: dict[tuple[str, int], list[Arrow]] = defaultdict(list)
        for arrow in arrows:
            pairs[arrow.kind, arrow.number].append(arrow)
        for number, ((kind, _), ends) in enumerate(pairs.items()):
            if len({end.is_begin for end in ends}) == 2 and all(end.lane in self._lanes for end in ends):
                for end in ends:
                    bound = {} if end.is_begin else {"bp": "e"}
                    place = {"ts": self._axis.common_ns(end.at_ns) / 1000, "id": self._rank * _ARROWS + number, **bound}
                    self._put("s" if end.is_begin else "f", kind, self._lanes[end.lane], cat=kind, **place)

    def metadata(self, name: str, label: str, names: Mapping[Lane, str], main: Lane | None) -> list[str]:
        """Return the lines that name the process and its lanes, of which the training and its collectives come first."""
        events, self.texts = self.texts, []
        process = {
            "process_name": {"name": name},
            "process_labels": {"labels": label},
            "process_sort_index": {"sort_index": self._rank},
        }
        for what, value in process.items():
            self._put("M", what, self._lane(main) if main else self._rank * _LANES + _LANES, ts=0, args=value)
        for lane, tid in list(self._lanes.items()):
            is_ours = lane[0] == "collectives"
            title = (
                "training"
                if lane == main
                else f"collectives {lane[1]}"
                if is_ours
                else names.get(lane, f"ranges of stream {lane[1]}")
            )
            self._put("M", "thread_name", tid, ts=0, args={"name": title})
            order = 0 if lane == main else 1 if is_ours else 2
            self._put("M", "thread_sort_index", tid, ts=0, args={"sort_index": order * _LANES + tid % _LANES})
        events, self.texts = self.texts, events
        return events

    def _lane(self, lane: Lane) -> int:
        return self._lanes.setdefault(lane, (self._rank + 1) * _LANES + len(self._lanes))

    def _put(self, phase: str, name: str, tid: int, **more: Any) -> None:
        self.texts.append(json.dumps({"ph": phase, "name": name, "pid": self._rank + 1, "tid": tid, **more}))
