"""What a trace must be for viewers to show all of it: "Trace Event Format", and what Perfetto makes of it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """The events of a trace, which are well-formed, nest and are named."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["name"], event
        assert event["pid"] > 0, event
        assert event["ts"] >= 0, event
        assert event["ph"] in ("X", "M", "s", "f"), event
        assert event["ph"] != "X" or (event["dur"] >= 0 and event["cat"] and isinstance(event.get("args", {}), dict)), event
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in named, event
    _check_nesting(events)
    return events


def _check_nesting(events: list[Event]) -> None:
    slices: dict[int, list[tuple[int, int]]] = defaultdict(list)  # begin and end in nanoseconds, by thread
    for event in events:
        if event["ph"] == "X":
            begin_ns = round(event["ts"] * 1000)
            slices[event["tid"]].append((begin_ns, begin_ns + round(event["dur"] * 1000)))
    for tid, spans in slices.items():
        stack: list[int] = []
        for begin_ns, end_ns in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= begin_ns:
                stack.pop()
            assert not stack or end_ns <= stack[-1], (tid, begin_ns, end_ns, stack)
            stack.append(end_ns)


def processes(events: list[Event]) -> list[str]:
    """The names of the processes, as they are sorted."""
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [names[pid] for pid in sorted(names, key=order.__getitem__)]


def check_one_axis(events: list[Event], *, ranks: int, error_us: float) -> int:
    """No rank is done with a step's gradients before all ranks have begun to compute them. Return the number of steps."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in (event for event in events if event["ph"] == "X" and event["name"].startswith("step ")):
        inside = [
            event
            for event in events
            if event["ph"] == "X" and event["tid"] == step["tid"] and 0 <= event["ts"] - step["ts"] <= step["dur"]
        ]
        begin_us = min(event["ts"] for event in inside if event["name"] == "backward")
        spans[step["name"]].append(
            (begin_us, max(event["ts"] + event["dur"] for event in inside if event["name"] == "optimizer"))
        )
    for name, of_ranks in spans.items():
        assert len(of_ranks) == ranks, name
        apart_us = max(begin_us for begin_us, _ in of_ranks) - min(end_us for _, end_us in of_ranks)
        assert apart_us <= error_us, (name, apart_us)
    return len(spans)
