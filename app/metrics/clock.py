"""Where one process spends its time: the phases of a step, pauses for evaluation and saving, and waiting for other ranks.

Phases end at a lap. On a CPU a lap is read from the host's clock. A GPU works through what it was given while the host is
ahead of it, so there a lap is an event in the GPU's own queue (CUDA events: docs.pytorch.org/docs/stable/notes/cuda.html,
"Asynchronous execution"): what it idled for data is then the wait, however long the host was asleep.

Within a lap the time in which the process stands still for the others (`stand_still` to `go_on`) is a phase of its own.

DDP is timed by callbacks around its own, at the end of a backward pass. Its own timers wait in the next forward pass for its
events where they measure a step (torch/csrc/distributed/c10d/logger.cpp and reducer_cuda.cpp): they measure the first ten, from
which nothing keeps them, and no others.

FSDP2 and DeepSpeed are Python: on a CPU their ranks stand still in torch's `Work.wait`, on GPUs their streams do where they are
told to wait, or where a collective is put into them. Torch has no hook there. So these few methods, through which both go, are
replaced by timed ones while a run trains.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from app.distributed import model_preparation

Phase = Literal["data_wait", "forward_backward", "optimizer", "communication", "other"]
"""`communication` is what of a lap it stood still for the others; `other` is what is in none: counting, logging, agreeing."""
_PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Spent:
    """Seconds of a run, from its start or between two readings."""

    training_s: float
    """All but pauses."""
    held_s: float
    """In which the training was held by saving."""
    phases_s: Mapping[Phase, float]
    """The phases of the steps, on the device: as long together as the training, but for what a GPU has still to do."""

    def __sub__(self, earlier: Spent) -> Spent:
        phases_s = {phase: time_s - earlier.phases_s[phase] for phase, time_s in self.phases_s.items()}
        return Spent(self.training_s - earlier.training_s, self.held_s - earlier.held_s, phases_s)


NOTHING = Spent(0.0, 0.0, dict.fromkeys(_PHASES, 0.0))


class Clock:
    """Seconds of training, by phases, with pauses (evaluation, saving) kept apart."""

    def __init__(self, device: torch.device) -> None:
        self.pause_s = 0.0
        """Length of the last pause."""
        self._held_s, self._spent_s, self._since_s = 0.0, 0.0, time.perf_counter()
        self._laps: _Laps = _CudaLaps(device) if device.type == "cuda" else _HostLaps()
        self.lap = self._laps.end
        """`lap(phase)`: what went on since the last lap was this phase."""
        self._is_paused = False

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    def spent(self) -> Spent:
        """Return the time since the start; the phases up to the last lap. Waits for a GPU to come so far."""
        phases_s = self._laps.total_s()
        return Spent(self.training_s, self._held_s, phases_s)

    def stand_still(self) -> bool:
        """Note that the process waits for the others from here on; false, and nothing is noted, in a pause.

        On a GPU it is the stream that it was on when the clock was made.
        """
        if not self._is_paused:
            self._laps.stand_still()
        return not self._is_paused

    def go_on(self) -> None:
        """Note that the waiting is over."""
        self._laps.go_on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training. In a profile it has this name."""
        self.lap("other")
        self._spent_s, start_s, self._is_paused = self.training_s, time.perf_counter(), True
        try:
            with torch.profiler.record_function("paused"):
                yield
        finally:
            self._laps.begin()
            self._is_paused = False
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        with self.paused():
            yield
        self._held_s += self.pause_s


class _Laps(Protocol):
    def begin(self) -> None:
        """Begin a lap here: what went on before is in no phase."""

    def end(self, phase: Phase) -> None:
        """End a lap, and begin the next."""

    def stand_still(self) -> None:
        """Begin to wait."""

    def go_on(self) -> None:
        """End waiting."""

    def total_s(self) -> dict[Phase, float]:
        """Return the time of every phase in seconds."""


class _HostLaps:
    def __init__(self) -> None:
        self._total_s = dict.fromkeys(_PHASES, 0.0)
        self._stood_still_s = 0.0
        self.begin()

    def begin(self) -> None:
        self._began_s, self._waited_s = time.perf_counter(), 0.0

    def end(self, phase: Phase) -> None:
        now_s = time.perf_counter()
        self._total_s[phase] += now_s - self._began_s - self._waited_s
        self._total_s["communication"] += self._waited_s
        self._began_s, self._waited_s = now_s, 0.0

    def stand_still(self) -> None:
        self._stood_still_s = time.perf_counter()

    def go_on(self) -> None:
        self._waited_s += time.perf_counter() - self._stood_still_s

    def total_s(self) -> dict[Phase, float]:
        return dict(self._total_s)


_Mark = Phase | Literal["stands still", "goes on"] | None
"""What ends with an event: a lap, the time before or in a wait, or (None) what is in no phase."""


class _CudaLaps:
    def __init__(self, device: torch.device) -> None:
        self._total_s = dict.fromkeys(_PHASES, 0.0)
        self._worked_s, self._waited_s = 0.0, 0.0
        """Of the lap that has not ended."""
        self._stream = torch.cuda.current_stream(device)
        self._free: list[Any] = []
        self._ended: list[tuple[_Mark, Any]] = []
        self.begin()

    def begin(self) -> None:
        self._record(None)

    def end(self, phase: Phase) -> None:
        self._record(phase)

    def stand_still(self) -> None:
        self._record("stands still")

    def go_on(self) -> None:
        self._record("goes on")

    def total_s(self) -> dict[Phase, float]:
        self._ended[-1][1].synchronize()
        for (_, begin), (mark, end) in zip(self._ended, self._ended[1:], strict=False):
            self._add(mark, begin.elapsed_time(end) / 1000)
        self._free += [event for _, event in self._ended[:-1]]
        self._ended = self._ended[-1:]
        return dict(self._total_s)

    def _add(self, mark: _Mark, elapsed_s: float) -> None:
        if mark == "stands still":
            self._worked_s += elapsed_s
        elif mark == "goes on":
            self._waited_s += elapsed_s
        else:
            if mark is not None:
                self._total_s[mark] += self._worked_s + elapsed_s
                self._total_s["communication"] += self._waited_s
            self._worked_s, self._waited_s = 0.0, 0.0

    def _record(self, mark: _Mark) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._ended.append((mark, event))


_NEVER = 2**31 - 1
"""Steps from one that DDP measures to the next, after the first ten: an int."""
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
"""Methods of a process group, some under the names of one version of torch only (2.8 to 2.15)."""


class Communication:
    """Exposed communication of a prepared model: the part of it that no work hides."""

    def __init__(self, model: torch.nn.Module, clock: Clock, device: torch.device) -> None:
        """`clock` is told of each wait."""
        self._clock, self._device = clock, device
        inner = model_preparation.uncompiled(model)
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None
        self.is_timed = dist.is_initialized()
        """Whether there is a group to wait for, of one process if need be."""
        if self._ddp is not None:
            self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Within the block, tell the clock when this process waits for others."""
        with ExitStack() as replaced:
            if self._ddp is not None:
                replaced.enter_context(_backward_passes_timed(self._ddp, self._clock))
            elif self.is_timed:
                _time_waits(self._clock, self._device, replaced)
            yield


@contextmanager
def _backward_passes_timed(ddp: DistributedDataParallel, clock: Clock) -> Iterator[None]:
    """Have the clock told of what is left of DDP's communication when a backward pass has computed its last gradient.

    DDP waits for it, or has the stream wait, in a callback at the end of the pass, which it asks for when the last gradient is
    there (torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready`). Callbacks are called in the order in which they were
    asked for, and may ask for more (torch/csrc/autograd/engine.cpp, `exec_post_processing`). Ours is asked for with a gradient,
    before DDP takes note of that, so it comes before DDP's; and what it asks for comes after.
    """
    ask_for = torch.autograd.Variable._execution_engine.queue_callback

    def begin() -> None:
        if clock.stand_still():
            ask_for(clock.go_on)

    def see(_gradient: torch.Tensor) -> None:
        if ddp.require_backward_grad_sync:
            ask_for(begin)

    # Who looks at a gradient may have it copied: let it be the smallest.
    smallest = min((weight for weight in ddp.parameters() if weight.requires_grad), key=torch.Tensor.numel)
    handle = smallest.register_hook(see)
    try:
        yield
    finally:
        handle.remove()


def _time_waits(clock: Clock, device: torch.device, replaced: ExitStack) -> None:
    if device.type != "cuda":
        replaced.enter_context(_replaced(dist.Work, "wait", clock))
        replaced.enter_context(_replaced(_functional_collectives, "wait_tensor", clock))
        return
    training = torch.cuda.current_stream(device)

    def is_current(*_: Any) -> bool:
        return bool(torch.cuda.current_stream(device) == training)

    replaced.enter_context(_replaced(dist.Work, "wait", clock, is_current))
    replaced.enter_context(_replaced(_functional_collectives, "wait_tensor", clock, is_current))
    for name in _COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            replaced.enter_context(_replaced(dist.ProcessGroup, name, clock, is_current))
    replaced.enter_context(_replaced(torch.cuda.Stream, "synchronize", clock, is_current))
    of_training = _replaced(torch.cuda.Stream, "wait_event", clock, lambda stream, *_: bool(stream == training))
    replaced.enter_context(of_training)


@contextmanager
def _replaced(owner: Any, name: str, clock: Clock, stands_still: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Have a function that tells the clock in the place of one in which this process may stand still."""
    original, own = getattr(owner, name), vars(owner).get(name)

    @functools.wraps(original)
    def timed(*args: Any, **keywords: Any) -> Any:
        # Threads that Python has started write checkpoints. Torch's own run the backward passes on GPUs.
        is_training = type(threading.current_thread()) is not threading.Thread and stands_still(*args)
        if not is_training or not clock.stand_still():
            return original(*args, **keywords)
        try:
            return original(*args, **keywords)
        finally:
            clock.go_on()

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)  # it inherits its own
        else:
            setattr(owner, name, own)
