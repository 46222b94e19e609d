"""Exposed communication: how long a rank waits for other ranks, measured without waiting for a GPU.

DDP is timed by callbacks around its own, at the end of a backward pass. Its own timers wait in the next forward pass for its
events where they measure a step (torch/csrc/distributed/c10d/logger.cpp and reducer_cuda.cpp): they measure the first ten, from
which nothing keeps them, and no others.

FSDP2 and DeepSpeed are Python. On a CPU their ranks wait in torch's `Work.wait`; on GPUs their streams wait for events, or for
a collective that is put into them. torch has no hook there, so the methods through which both go are replaced by timed ones
while a run trains.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from app.distributed import model_preparation
from app.metrics.clock import Clock

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
        """`clock` measures the waits."""
        self._clock, self._device = clock, device
        inner = model_preparation.uncompiled(model)
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None
        self.is_timed = dist.is_initialized()
        """Whether there is a group to wait for, of one process if need be."""
        if self._ddp is not None:
            self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure within the block when this process waits for other ranks."""
        with ExitStack() as replaced:
            if self._ddp is not None:
                replaced.enter_context(_backward_passes_timed(self._ddp, self._clock))
            elif self.is_timed:
                _time_waits(self._clock, self._device, replaced)
            yield


@contextmanager
def _backward_passes_timed(ddp: DistributedDataParallel, clock: Clock) -> Iterator[None]:
    """Measure the rest of DDP's communication after a backward pass has computed its last gradient.

    DDP waits for it, or has the stream wait, in a callback at the end of the pass, which it asks for when the last gradient is
    there (torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready`). Callbacks are called in the order in which they were
    asked for, and may ask for more (torch/csrc/autograd/engine.cpp, `exec_post_processing`). Ours is asked for with a gradient,
    before DDP takes note of that, so it comes before DDP's; and what it asks for comes after.
    """
    ask_for = torch.autograd.Variable._execution_engine.queue_callback

    def begin() -> None:
        if clock.begin_wait():
            ask_for(clock.end_wait)

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
def _replaced(owner: Any, name: str, clock: Clock, is_wait: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Replace a function in which this process may wait by one that measures how long."""
    original, own = getattr(owner, name), vars(owner).get(name)

    @functools.wraps(original)
    def timed(*args: Any, **keywords: Any) -> Any:
        # Threads that Python has started write checkpoints. Torch's own run the backward passes on GPUs.
        is_training = type(threading.current_thread()) is not threading.Thread and is_wait(*args)
        if not is_training or not clock.begin_wait():
            return original(*args, **keywords)
        try:
            return original(*args, **keywords)
        finally:
            clock.end_wait()

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)  # it inherits its own
        else:
            setattr(owner, name, own)
