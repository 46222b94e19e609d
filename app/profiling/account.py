"""Where the time of one process went in the steps that were recorded.

Each moment of a step is in exactly one part:

    communication   the process stands still for a collective operation
    copies          its GPU copies to or from the host, as offloaded weights, and does nothing else
    data_wait       it waits for its next samples
    optimizer       it takes the optimizer's step
    compute         it is in the forward and backward pass
    other           counting, logging, agreeing; on a GPU: it idles

On a CPU communication is where a collective is under way and no operator runs on the thread that trains. Torch does not say who
waits for what, so gaps count that are longer than what Python does between two operators, or in which a collective ends; gloo's
threads say so when the waiting one goes on already, on busy cores by milliseconds. With GPUs the parts are of the GPU, and
communication is where NCCL's kernels run and no others (as in github.com/facebookresearch/HolisticTraceAnalysis). What a GPU
copies or fills within its own memory is work as its kernels are. What is under way while others work is hidden. Evaluating and
saving, in between, are in no step. Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from app.profiling.raw import Event, Lane
from app.profiling.spans import Span, Spans, both, length, union, without

PARTS = ("compute", "optimizer", "communication", "copies", "data_wait", "other")
STEP, PAUSE = "step ", "paused"
"""Ranges of the training loop: a step with its number, and a pause."""
DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, LOG = PHASES = ("data wait", "forward", "backward", "optimizer", "log")
"""The ranges in a step."""
_LEAST_WAIT_NS = 100_000
"""Several times what Python takes between two operators of a forward pass."""
_TOP = 40
"""Operations that are kept: those of all ranks are put together, and few are shown."""


@dataclass
class Collective:
    """A collective operation in a step, as one rank saw it."""

    event: Event
    came_ns: int
    """When this rank was there: it called for it, or its GPU came so far."""
    step: int
    number: int
    """Which one of its name in the step it is, from 0: the same on all ranks."""
    exposed_ns: int = 0
    """How long this rank stood still for it, up to its end."""


@dataclass
class Account:
    """Time in nanoseconds."""

    parts_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    """Of all steps together."""
    outstanding_ns: int = 0
    """In which a collective was begun and not done."""
    collectives: list[Collective] = field(default_factory=list)
    """In the order of their ends."""
    operations: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, own time (without that of what it calls), and how often: those that took most."""


class Process:
    """The events of one process, taken in one by one."""

    def __init__(self) -> None:
        self._steps: dict[int, Span] = {}
        self._pauses: list[Span] = []
        self._ranges: dict[str, list[Span]] = defaultdict(list)
        self._device_optimizer: list[Span] = []
        self._threads: dict[Lane, list[tuple[int, int, str]]] = defaultdict(list)
        self._gloo: list[Event] = []
        self._on_gpu: list[Event] = []
        self._launches: dict[int, int] = {}
        self.main: Lane | None = None
        """The lane of the thread that trains, once a step was seen."""

    def add(self, event: Event) -> None:
        """Take in an event."""
        span = (event.begin_ns, event.end_ns)
        if event.is_of_gloo:
            self._gloo.append(event)
        elif event.is_of_gpu:
            self._on_gpu.append(event)
        elif event.kind in ("cuda_runtime", "cuda_driver"):
            self._launches[event.arguments.get("correlation", -1)] = event.begin_ns
        elif event.kind == "cpu_op":
            self._threads[event.lane].append((event.begin_ns, -event.end_ns, event.name))
        elif event.kind == "gpu_user_annotation" and event.name == OPTIMIZER:
            self._device_optimizer.append(span)
        elif event.kind == "user_annotation":
            self._add_range(event, span)

    def _add_range(self, event: Event, span: Span) -> None:
        if event.name.startswith(STEP) and event.name.removeprefix(STEP).isdigit():
            self._steps[int(event.name.removeprefix(STEP))] = span
            self.main = event.lane
        elif event.name == PAUSE:
            self._pauses.append(span)
        elif event.name in PHASES:
            self._ranges[event.name].append(span)

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded."""
        return sorted(self._steps)

    def account(self) -> Account:
        """Return where the time went, when all events are there."""
        account = Account()
        if self._on_gpu and self._steps:  # the host may be steps ahead of its GPU, which it waited for at the end
            last, (begin_ns, end_ns) = max(self._steps.items())
            self._steps[last] = (begin_ns, max(end_ns, *(event.end_ns for event in self._on_gpu)))
        steps = without(union(self._steps.values()), union(self._pauses))
        for operators in self._threads.values():
            operators.sort()
        account.operations = self._operations(steps)
        account.collectives = sorted(self._collectives(steps), key=lambda collective: collective.event.end_ns)
        spans = [(one.came_ns, one.event.end_ns) for one in account.collectives]
        account.outstanding_ns = length(both(union(spans), steps))
        exposed = (self._parts_of_device if self._on_gpu else self._parts_of_host)(account, spans, steps)
        _attribute(exposed, account.collectives)
        return account

    def _collectives(self, steps: Spans) -> Iterable[Collective]:
        """Those that the training called for in a step, and none that was called for beside it, as by a save."""
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for called_ns, came_ns, event in sorted(self._called_for(), key=lambda one: one[0]):
            if _is_in(steps, called_ns):
                (step,) = [step for step, (begin, end) in self._steps.items() if begin <= called_ns < end]
                yield Collective(event, came_ns, step, counts[step, event.name])
                counts[step, event.name] += 1

    def _called_for(self) -> Iterable[tuple[int, int, Event]]:
        """The collectives, with when they were called for, and when this rank was there."""
        if self._on_gpu:  # what goes round past the GPU keeps nobody waiting but the host
            for event in self._on_gpu:
                if event.is_of_nccl:
                    yield self._launches.get(event.arguments.get("correlation", -1), event.begin_ns), event.begin_ns, event
            return
        calls = sorted(
            (begin_ns, lane)
            for lane, operators in self._threads.items()
            for begin_ns, _, name in operators
            if name.startswith("c10d::")
        )
        events = sorted(self._gloo, key=lambda event: event.begin_ns)
        if len(calls) != len(events):  # a call that is not seen as an event, or the other way round
            calls = [(event.begin_ns, self.main or event.lane) for event in events]
        # gloo's threads begin what is called for in this order, some 0.1 ms later.
        for (begin_ns, lane), event in zip(calls, events, strict=True):
            if lane == self.main:
                yield begin_ns, begin_ns, event

    def _parts_of_host(self, account: Account, collectives: Sequence[Span], steps: Spans) -> Spans:
        """Fill in the parts, and return when the process stood still for these, sorted by their ends."""
        busy = _leaves(self._threads[self.main]) if self.main in self._threads else []
        exposed = _waits(busy, collectives, steps)
        free = without(steps, exposed)
        shares = {phase: length(both(free, union(self._ranges[phase]))) for phase in PHASES}
        parts = {"compute": shares[FORWARD] + shares[BACKWARD], "optimizer": shares[OPTIMIZER], "data_wait": shares[DATA_WAIT]}
        self._fill(account, {**parts, "communication": length(exposed)}, steps)
        return exposed

    def _parts_of_device(self, account: Account, collectives: Sequence[Span], steps: Spans) -> Spans:
        """Do as `_parts_of_host` does, with the GPU as the one that works or stands still."""
        own = [event for event in self._on_gpu if not event.is_of_nccl]
        busy = both(union((event.begin_ns, event.end_ns) for event in own if not event.is_copy), steps)
        exposed = without(both(union(collectives), steps), busy)
        free = without(without(steps, busy), exposed)
        copies = both(union((event.begin_ns, event.end_ns) for event in own if event.is_copy), free)
        waits = both(without(free, copies), union(self._ranges[DATA_WAIT]))
        optimizer = length(both(busy, union(self._device_optimizer)))
        parts = {"compute": length(busy) - optimizer, "optimizer": optimizer, "communication": length(exposed)}
        self._fill(account, {**parts, "copies": length(copies), "data_wait": length(waits)}, steps)
        return exposed

    def _fill(self, account: Account, parts_ns: dict[str, int], steps: Spans) -> None:
        account.parts_ns |= {**parts_ns, "other": length(steps) - sum(parts_ns.values())}

    def _operations(self, steps: Spans) -> list[tuple[str, int, int]]:
        own_ns: dict[str, int] = defaultdict(int)
        counts: dict[str, int] = defaultdict(int)
        for name, time_ns in self._device_times(steps) if self._on_gpu else self._host_times(steps):
            own_ns[name] += time_ns
            counts[name] += 1
        most = sorted(own_ns, key=lambda name: -own_ns[name])[:_TOP]
        return [(name, own_ns[name], counts[name]) for name in most]

    def _device_times(self, steps: Spans) -> Iterable[tuple[str, int]]:
        for event in self._on_gpu:
            if not event.is_of_nccl and _is_in(steps, event.begin_ns):
                yield event.name, event.end_ns - event.begin_ns

    def _host_times(self, steps: Spans) -> Iterable[tuple[str, int]]:
        for operators in self._threads.values():
            for name, time_ns in _own_times([one for one in operators if _is_in(steps, one[0])]):
                if _is_operator(name):
                    yield name, time_ns


def _is_operator(name: str) -> bool:
    """Whether it is an operator that computes: not a collective, nor what only calls others and may wait in between."""
    return "::" in name and not name.startswith(("autograd::", "c10d::", "_c10d_functional"))


def _is_in(spans: Spans, moment: int) -> bool:
    place = bisect_right(spans, (moment, math.inf)) - 1
    return place >= 0 and moment < spans[place][1]


def _leaves(operators: Sequence[tuple[int, int, str]]) -> Spans:
    """When an operator was running that calls no other: outer ones may wait between two that they call."""
    following = [begin for begin, _, _ in operators[1:]]
    return union(
        (begin, -end)
        for (begin, end, name), after in zip(operators, [*following, -1], strict=True)
        if _is_operator(name) and not begin <= after < -end
    )


def _own_times(operators: Iterable[tuple[int, int, str]]) -> Iterable[tuple[str, int]]:
    """The operators of a thread, sorted by begin and negated end, with their times without what they call."""
    stack: list[tuple[int, str]] = []  # end and name of those that are open
    own: list[int] = []
    for begin, negated_end, name in operators:
        while stack and stack[-1][0] <= begin:
            yield stack.pop()[1], own.pop()
        if own:
            own[-1] -= -negated_end - begin
        stack.append((-negated_end, name))
        own.append(-negated_end - begin)
    yield from ((name, time_ns) for (_, name), time_ns in zip(stack, own, strict=True))


def _waits(busy: Spans, collectives: Sequence[Span], steps: Spans) -> Spans:
    """When the training thread stood still for one of these, sorted by their ends."""
    ends = [end for _, end in collectives]
    gaps = [
        (begin, end)
        for begin, end in without(steps, busy)
        if end - begin >= _LEAST_WAIT_NS or bisect_right(ends, end) > bisect_right(ends, begin)
    ]
    return both(gaps, union(collectives))


def _attribute(exposed: Spans, collectives: Sequence[Collective]) -> None:
    """Give each moment of standing still to the collective, of those outstanding, that is done first."""
    left = exposed
    for collective in collectives:
        span = (collective.came_ns, collective.event.end_ns)
        first = bisect_right(left, (span[0],))  # all before end earlier, but perhaps the last of them
        waited = both(left[max(0, first - 1) : bisect_right(left, (span[1],))], [span])
        collective.exposed_ns = length(waited)
        if waited:
            left = without(left, waited)
