"""How long a rank stands still for the others.

DDP times its own buckets. FSDP2 and DeepSpeed tell nothing, but they are Python: on a CPU their ranks stand still in torch's
`Work.wait`, on GPUs their streams do where they are told to wait, or where a collective is put into them. These few methods of
torch, through which both go, are timed while a run trains, by others in their place. Torch has no hook there, on its side of a
wait; before and after the training its methods are its own.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from app import compiling
from app.metrics.clock import Clock, Phase

_SAMPLE_EVERY_STEPS = 10
"""DDP measures the first ten steps and every hundredth from then on, unless it is told otherwise."""
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
        """`clock` is told of each wait, where the strategy does not tell by itself."""
        self._clock, self._device = clock, device
        inner = compiling.uncompiled(model)
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None
        self._is_timed = self._ddp is None and dist.is_initialized() and dist.get_world_size() > 1
        if self._ddp is not None:
            self._ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_EVERY_STEPS)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Have the clock told, in the block, when this process stands still."""
        with ExitStack() as replaced:
            if self._is_timed:
                _time_waits(self._clock, self._device, replaced)
            yield

    def set_apart(self, phases_s: Mapping[Phase, float], *, steps: int) -> dict[Phase, float]:
        """Return the seconds of so many steps with the communication in none but its own phase: NaN if it is not known."""
        if self._is_timed:
            return dict(phases_s)
        exposed_s = self._exposed_in_backward_s()
        if exposed_s is None:
            return {**phases_s, "communication": math.nan}
        passes_s = phases_s["forward_backward"]
        communication_s = min(exposed_s * steps, passes_s)
        return {**phases_s, "communication": communication_s, "forward_backward": passes_s - communication_s}

    def _exposed_in_backward_s(self) -> float | None:
        """What was left of DDP's communication when the backward pass ended that was measured last. None: not known."""
        if self._ddp is None:
            return None
        # On GPUs by events (torch/csrc/distributed/c10d/reducer_timer.hpp).
        said = self._ddp._get_ddp_logging_data()
        total_ns, hidden_ns = said.get("backward_comm_time"), said.get("backward_compute_comm_overlap_time")
        return None if total_ns is None or hidden_ns is None else max(0.0, (total_ns - hidden_ns) / 1e9)


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
