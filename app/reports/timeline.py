"""`samerun timeline RUN`: merges the traces of all ranks into one, on the clock of rank 0, for Perfetto and chrome://tracing.

torch's traces have the "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
Times are microseconds after `baseTimeNanoseconds`, a Unix time. Standard library only.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.files.atomic_files import file_made_whole, refusal
from app.files.text_files import parsed
from app.options import Parser
from app.reports.past_run import print_text
from app.runs import run_folder

TIMELINE = "timeline.json.gz"
_LANES = 1000
"""Threads and streams that a rank may have. Their `tid` is unique over all ranks."""
_ARROWS = 1 << 32
"""Arrows that a rank may have, from a launch to its kernel or from an operator to its backward pass."""
_BROKEN = (OSError, EOFError, zlib.error, ValueError, LookupError, ArithmeticError, TypeError, AttributeError)


def main(argv: Sequence[str]) -> int:
    """Write RUN/profile/timeline.json.gz; return the exit code. Raises RunFolderError if there is no profile."""
    parser = Parser("timeline", "Merge the profiler traces of all ranks into one, for ui.perfetto.dev or chrome://tracing.")
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run trained with profile.steps, such as 10:20")
    folder = parser.parse_all(argv).run / run_folder.PROFILE
    print_text("\n".join(merge(folder)))
    return 0


def merge(folder: Path) -> list[str]:
    """Write the timeline of the traces in a folder; return where it is, and what is missing in it.

    Raises RunFolderError if no trace can be read, or the timeline cannot be written.
    """
    if not (folder / "ranks.json").exists():
        raise RunFolderError(f"{folder.parent} has no profile: train with profile.steps=10:20 to get one.")
    ranks = run_folder.read_json(folder / "ranks.json").get("ranks")
    lines, separator, error_ms = [], "", 0.0
    try:
        with file_made_whole(folder / TIMELINE) as temporary, gzip.open(temporary, "wt", compresslevel=5) as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, rank in enumerate(ranks if isinstance(ranks, list) else []):
                path = folder / f"rank-{number}.json.gz"
                try:
                    events = list(_events(number, rank, parsed(gzip.decompress(path.read_bytes()))))
                    error_ms = max(error_ms, rank["clock_error_ns"] / 1e6)
                except _BROKEN as error:
                    reason = error if isinstance(error, (OSError, EOFError, ValueError)) else f"no trace: {error!r}"
                    lines.append(f"{path} cannot be read ({reason}): rank {number} is missing in the timeline.")
                    continue
                for event in events:
                    file.write(f"{separator}\n{json.dumps(event)}")
                    separator = ","
            file.write("\n]}\n")
            if not separator:
                raise RunFolderError(f"{folder} has no readable trace: {' '.join(lines) or 'ranks.json names no rank'}")
    except OSError as error:
        raise RunFolderError(refusal(folder / TIMELINE, "written", error)) from error
    if error_ms:
        lines.append(f"the clocks of other hosts are known to {error_ms:.2f} ms")
    return [*lines, f"{folder / TIMELINE}: open it at ui.perfetto.dev or in chrome://tracing"]


def _events(number: int, rank: dict[str, Any], trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a rank's events on the common time axis, then the names of its process (the rank) and lanes (threads, streams)."""
    (begin_ns, begin_ahead_ns), (end_ns, end_ahead_ns) = rank["clock"]
    drift = (end_ahead_ns - begin_ahead_ns) / max(1, end_ns - begin_ns)

    def common_ns(moment_ns: int) -> int:
        """Return a moment of the trace in nanoseconds since the recording began, by rank 0's clock."""
        unix_ns = int(trace["baseTimeNanoseconds"]) + moment_ns
        ahead_ns: int = round(begin_ahead_ns + drift * (unix_ns - begin_ns))
        return unix_ns - int(rank["zero_ns"]) - ahead_ns

    events = [event for event in trace["traceEvents"] if isinstance(event["pid"], int)]  # others are about the profiler itself
    threads = [event for event in events if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"], False): event["args"]["name"].strip() for event in threads}
    pid = number + 1  # to some viewers 0 is the idle process
    lanes: dict[Any, int] = {}
    ends: list[int] = []  # of the last collective in each lane of gloo's
    for event in sorted((event for event in events if event["ph"] != "M"), key=lambda event: float(event["ts"])):
        at_ns = round(event["ts"] * 1000)
        until_ns = at_ns + round(event.get("dur", 0) * 1000)
        # A GPU's ranges may overlap its stream's kernels, and gloo's collectives overlap each other: they get other lanes.
        is_range = event.get("cat") == "gpu_user_annotation"
        lane: Any = (event["pid"], event["tid"], is_range)
        if event["name"].startswith("gloo:"):
            free = next((index for index, end in enumerate(ends) if end <= at_ns), len(ends))
            ends[free : free + 1] = [until_ns]
            lane = f"collectives {free}"
            names[lane] = lane
        elif is_range:
            names[lane] = f"ranges of stream {event['tid']}"
        elif event["name"].startswith("step "):
            names[lane] = "training"
        moved = {"pid": pid, "tid": lanes.setdefault(lane, pid * _LANES + len(lanes)), "ts": common_ns(at_ns) / 1000}
        if "dur" in event:
            moved["dur"] = (common_ns(until_ns) - common_ns(at_ns)) / 1000
        if "id" in event:
            moved["id"] = number * _ARROWS + event["id"]
        yield event | moved

    def name(what: str, tid: int, **value: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": value}

    yield name("process_name", pid * _LANES, name=f"rank {number} on {rank['host']}, {rank['device']}")
    yield name("process_labels", pid * _LANES, labels=rank["strategy"])
    yield name("process_sort_index", pid * _LANES, sort_index=number)
    for lane, tid in lanes.items():
        title = names.get(lane, "")
        yield name("thread_name", tid, name=title)
        yield name("thread_sort_index", tid, sort_index=0 if title == "training" else 1 if "collectives" in title else 2)
