"""RUN/profile/rank-K.json.gz: the trace of one rank on the common time axis, and where its time went.

It is a Chrome trace by itself, in lines: the first holds all that a summary needs and opens the list of events, of which each
has a line. So traces are put together without being understood, and one that was cut in copying is read as far as it goes.
Standard library only.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.profiling import raw
from app.profiling.account import PARTS, Process
from app.profiling.trace_lines import TraceLines
from app.ranks.clocks import Axis

PATTERN = "rank-*.json.gz"
_OPENING, _CLOSING = '{"displayTimeUnit": "ms", "samerun": %s, "traceEvents": [\n', "]}\n"
_LEVEL = 5
"""Of gzip: half the time of its default, for a few per cent more bytes."""


@dataclass(frozen=True, kw_only=True)
class Who:
    """A rank, and the recording that it was part of."""

    recorded: float
    """When the recording began, in Unix seconds by the main process's clock: it tells the files of two recordings apart."""
    rank: int
    world_size: int
    host: str
    device: str
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Header(Who):
    """What the first line says of a rank; times are of all its steps together."""

    steps: list[int]
    """The steps that were recorded, 1 being the first of the run."""
    clock_error_us: float
    """How far its moments may be off those of rank 0."""
    parts_us: dict[str, float]
    """Where the time went (app/profiling/account.py)."""
    outstanding_us: float
    """In which a collective was begun and not done."""
    collectives: list[tuple[int, str, int, float, float, float]]
    """Step, name, which of that name in the step, when the rank was there, end, and how long it stood still up to the end."""
    operations: list[tuple[str, float, int]]
    """Name, own time, and how often."""

    @property
    def name(self) -> str:
        """The rank as it is called in the timeline and the summary."""
        return f"rank {self.rank} on {self.host}, {self.device}"


def path_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank in a folder of profiles."""
    return folder / f"rank-{rank}.json.gz"


def write(folder: Path, trace: Path, axis: Axis, who: Who) -> None:
    """Write a rank's file, whole or not at all, from torch's trace of it."""
    process, lines = Process(), TraceLines(who.rank, axis)
    names: dict[raw.Lane, str] = {}
    arrows, gloo = [], []
    for item in raw.read(trace):
        if isinstance(item, raw.LaneName):
            names.setdefault(item.lane, item.name)
        elif isinstance(item, raw.Arrow):
            arrows.append(item)
        else:
            process.add(item)
            if item.is_of_gloo:
                gloo.append(item)
            else:
                lines.add(item)
    header, collectives = _header(process, axis, who)
    lines.add_collectives(gloo, collectives)
    lines.add_arrows(arrows)
    metadata = lines.metadata(header.name, header.strategy, names, process.main)
    path = path_of(folder, who.rank)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_trace(temporary, asdict(header), (*metadata, *lines.texts))
    temporary.replace(path)


def _header(process: Process, axis: Axis, who: Who) -> tuple[Header, list[Any]]:
    account = process.account()
    times: list[Any] = [
        (one.step, one.event.name, one.number, *(axis.common_ns(at) / 1000 for at in (one.came_ns, one.event.end_ns)),
         one.exposed_ns / 1000)
        for one in account.collectives
    ]  # fmt: skip
    header = Header(
        **vars(who),
        steps=process.steps,
        clock_error_us=axis.error_ns / 1000,
        parts_us={part: time_ns / 1000 for part, time_ns in account.parts_ns.items()},
        outstanding_us=account.outstanding_ns / 1000,
        collectives=times,
        operations=[(name, time_ns / 1000, count) for name, time_ns, count in account.operations],
    )
    return header, account.collectives


def write_trace(path: Path, about: dict[str, Any], events: Iterable[str]) -> int:
    """Write a compressed trace of these events, each a JSON text, and return how many bytes it has uncompressed."""
    num_bytes = 0
    with gzip.open(path, "wb", compresslevel=_LEVEL) as file:
        num_bytes += file.write((_OPENING % json.dumps(about)).encode())
        for number, event in enumerate(events):
            num_bytes += file.write(f"{',' if number else ''}{event}\n".encode())
        num_bytes += file.write(_CLOSING.encode())
    return num_bytes


class RankFile:
    """A rank's file that is read: its header at once, its events as they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises RunFolderError if the file cannot be read, or not even its first line."""
        self.path = path
        self.complaint = ""
        """After its events were read: a sentence, if the file was cut or broken."""
        try:
            with gzip.open(path, "rt") as file:
                self.header = _parse(file.readline())
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} cannot be read ({error or type(error).__name__}) and is ignored.") from error

    def events(self) -> Iterator[str]:
        """Yield its events, each a JSON text, up to the end or to where the file is cut or broken."""
        count = 0
        try:
            with gzip.open(self.path, "rt") as file:
                file.readline()
                for line in file:
                    if line == _CLOSING:
                        return
                    if not line.endswith("}\n"):
                        break
                    yield line[line.startswith(",") : -1]
                    count += 1
        except (OSError, EOFError, zlib.error, ValueError):
            pass  # said below, as of one that ends early
        self.complaint = f"{self.path} is truncated or damaged after {count:,} events: the timeline misses the rest."


def _parse(line: str) -> Header:
    values = json.loads(f"{line}]}}")["samerun"]
    values["collectives"] = [tuple(one) for one in values["collectives"]]
    values["operations"] = [tuple(one) for one in values["operations"]]
    values["parts_us"] = dict.fromkeys(PARTS, 0.0) | values["parts_us"]  # older files lack one
    return Header(**{field.name: values[field.name] for field in fields(Header)})
