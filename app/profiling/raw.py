"""The trace of one process, as torch.profiler leaves it: read an event at a time, since the file may be larger than memory.

What the events are was seen with torch 2.15 (its profiler is Kineto, github.com/pytorch/kineto): `cpu_op` an operator on a
thread, `user_annotation` a named range, or a collective operation of gloo, from the moment it was begun until it was done,
whichever thread did it; `kernel`, `gpu_memcpy` and `gpu_memset` what ran in a stream of a GPU, NCCL's collectives among the
kernels; `cuda_runtime` what launched it, with the same `correlation` (libkineto/src/ActivityType.cpp; the names of copies,
as "Memcpy HtoD (Pinned -> Device)", are those of CuptiActivity.cpp). A moment is `ts` microseconds after
`baseTimeNanoseconds`, a Unix time. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
_BASE = re.compile(r'"baseTimeNanoseconds":\s*(\d+)')
_BETWEEN = re.compile(r"[ \n\r\t,]*")
_EVENTS = re.compile(r'"traceEvents":\s*\[')

Lane = tuple[Any, Any, bool]
"""Process, thread (or device and stream), and whether it is for ranges, shown beside the stream that they span."""


@dataclass(frozen=True)
class Event:
    """Something that took time on this process, in Unix nanoseconds by its host's clock."""

    name: str
    kind: str
    """The event's category: cpu_op, user_annotation, kernel, ..."""
    lane: Lane
    begin_ns: int
    end_ns: int
    arguments: dict[str, Any]

    @property
    def is_of_gloo(self) -> bool:
        """Whether it is a collective operation on the CPU."""
        return self.name.startswith("gloo:")

    @property
    def is_of_gpu(self) -> bool:
        """Whether a GPU worked on it."""
        return self.kind in ("kernel", "gpu_memcpy", "gpu_memset")

    @property
    def is_copy(self) -> bool:
        """Whether a GPU copied to or from memory that is not its own: what computes may idle meanwhile."""
        return self.kind == "gpu_memcpy" and "DtoD" not in self.name

    @property
    def is_of_nccl(self) -> bool:
        """Whether it is a collective operation on GPUs."""
        return self.kind == "kernel" and "nccl" in self.name.lower()


@dataclass(frozen=True)
class Arrow:
    """One end of an arrow from what was launched to what ran, or from the forward to the backward pass."""

    kind: str
    number: int
    lane: Lane
    at_ns: int
    is_begin: bool


@dataclass(frozen=True)
class LaneName:
    """The name of a thread or stream."""

    lane: Lane
    name: str


def read(path: Path) -> Iterator[Event | Arrow | LaneName]:
    """Yield what is in a trace; what the profiler says of itself is left out."""
    base_ns, texts = _open(path)
    for values in texts:
        if not isinstance(values.get("pid"), int) or "tid" not in values:
            continue
        phase, kind = values["ph"], values.get("cat", "")
        lane = (values["pid"], values["tid"], kind == "gpu_user_annotation")
        at_ns = base_ns + round(values.get("ts", 0) * 1000)
        if phase == "X":
            end_ns = at_ns + round(values["dur"] * 1000)
            yield Event(values["name"], kind, lane, at_ns, end_ns, values.get("args", {}))
        elif phase in ("s", "f"):
            yield Arrow(kind, values["id"], lane, at_ns, phase == "s")
        elif phase == "M" and values["name"] == "thread_name":
            yield LaneName(lane, values["args"]["name"].strip())


def _open(path: Path) -> tuple[int, Iterator[dict[str, Any]]]:
    """The time that moments count from, and the events as they stand in the file."""
    file = path.open()
    head = ""
    while (found := _EVENTS.search(head)) is None:
        chunk = file.read(_CHUNK)
        if not chunk:
            raise ValueError(f"{path} holds no traceEvents")
        head += chunk
    base = _BASE.search(head[: found.start()])

    def events() -> Iterator[dict[str, Any]]:
        decoder, rest, at_end = json.JSONDecoder(), head[found.end() :], False
        with file:
            position = 0
            while True:
                position = _BETWEEN.match(rest, position).end()  # type: ignore[union-attr]  # it matches nothing as well
                if position < len(rest) and rest[position] == "]":
                    return
                try:
                    values, position = decoder.raw_decode(rest, position)
                    yield values
                except ValueError:
                    if at_end:
                        raise
                    chunk = file.read(_CHUNK)
                    rest, position, at_end = rest[position:] + chunk, 0, not chunk

    return int(base[1]) if base else 0, events()
