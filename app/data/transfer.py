"""Copies batches to the device while it computes: a copy starts before the batch is needed.

A thread has each batch written into pinned memory, from which a device reads by itself, and has it copied on a stream beside
the one that computes. The pinned memory is a ring of a few places, each made once: pinning takes longer than copying.

Nothing is written over what is still read:
- A place of the ring is written again when the copy out of it is done: the thread waits for an event behind the copy.
- The stream that computes waits, on the device, for the same event before it uses the batch.
- The batch's memory on the device is the allocator's, which is told of the stream that computes (`record_stream`), and gives it
  to another batch when that stream is done with it. A ring there would be written over under those who keep a part of a batch.
All batches of a process are copied on one stream, since the allocator keeps memory for each stream apart.

What was raised where batches are made is raised, at its place, where they are used. As NVIDIA apex's
examples/imagenet/main_amp.py and timm's timm/data/loader.py do from the training thread;
docs.pytorch.org/docs/stable/notes/cuda.html ("CUDA streams"). On a CPU, torch's stand-ins for streams copy at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.data.loader import Failure, Unwritten, split
from app.data.samples import Batch

PLACES = 3
"""Of the ring: one is written, one copied, and one waits to be used. So many batches (or groups of small ones) are ahead."""
_PATIENCE_S = 10.0
"""How long the end of a training waits for its thread: longer than torch's DataLoader needs (5 s) to see that a worker died."""
_SIGNAL_S = 0.1
"""An error may be that a worker process is gone. How it ended a signal tells the main thread, in torch's words, a bit later."""


class Ahead:
    """Batches on a device, each brought there while earlier ones are used. May be iterated over more than once."""

    def __init__(
        self, unwritten: Callable[[], Iterator[Unwritten | Failure]], device: torch.device, *, side: Side | None = None
    ) -> None:
        """`unwritten` begins to make the batches; `side` is what copies them, None: a stream of the device."""
        self._unwritten, self._side = unwritten, side or Side(device)

    def __iter__(self) -> Iterator[Batch | Failure]:
        unwritten = self._unwritten()
        # Here, not in the thread: what torch's DataLoader starts it starts now, and only the main thread learns of its death.
        first = next(unwritten, None)
        if first is None:
            return
        line = _Line(itertools.chain([first], unwritten), self._side)
        del unwritten  # the thread alone may hold it: closed with it, its processes end
        try:
            while (brought := line.take()) is not None:
                if isinstance(brought, Failure):
                    yield brought
                else:
                    self._side.receive(brought)
                    yield from brought.batches
        finally:
            line.close()


@dataclass(frozen=True)
class Brought:
    """Batches of one size on the device, or on their way to it."""

    fields: Mapping[str, Tensor]
    """All of them together."""
    batches: list[Batch]
    arrived: Any
    """The event behind the copy."""


class Side:
    """A device's stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self.is_apart = device.type != "cpu"
        """Whether the device has memory of its own."""

    def begin(self) -> None:
        """Make this the device of the thread that calls it: else it would begin to use the first one as well."""
        self._module.set_device(self._device)

    def send(self, written: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Begin to copy pinned memory to the device, and return what it becomes there and the event behind the copy."""
        stream, copied = _stream(self._device), self._module.Event()
        with self._module.stream(stream):
            fields = {name: tensor.to(self._device, non_blocking=True, copy=True) for name, tensor in written.items()}
        copied.record(stream)
        return fields, copied

    def receive(self, brought: Brought) -> None:
        """Have the caller's stream wait for a batch before it uses it."""
        computing = self._module.current_stream(self._device)
        brought.arrived.wait(computing)  # not computing.wait_event(): that is timed as waiting for other ranks
        if self.is_apart:
            for field in brought.fields.values():
                field.record_stream(computing)


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream()


class _Place:
    """Memory that a batch is written into, then another one."""

    def __init__(self, *, pinned: bool) -> None:
        self.copied: Any = None
        """The event behind the copy of what was written last."""
        self._pinned = pinned
        self._bytes: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
        """Return memory for a field."""
        size = math.prod(shape) * dtype.itemsize
        if name not in self._bytes or len(self._bytes[name]) < size:
            self._bytes[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes[name][:size].view(getattr(torch, dtype.name)).view(shape)


class _Line:
    """The thread that brings batches, and those that it has brought."""

    def __init__(self, unwritten: Iterator[Unwritten | Failure], side: Side) -> None:
        self._side, self._room, self._is_closed = side, threading.Semaphore(PLACES), False
        self._brought: SimpleQueue[Brought | Failure | BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(unwritten,), name="feed", daemon=True)
        self._thread.start()

    def take(self) -> Brought | Failure | None:
        """Return the next batch; None: there is no more. Raises the thread's exception."""
        brought = self._brought.get()
        self._room.release()
        if isinstance(brought, BaseException):
            time.sleep(_SIGNAL_S)
            raise brought
        return brought

    def close(self) -> None:
        """End the thread. A thread that hangs, for example on a disk, is left behind: it ends with the process."""
        self._is_closed = True
        self._room.release()
        if threading.current_thread() is not self._thread:  # which may be where garbage is collected
            self._thread.join(_PATIENCE_S)

    def _work(self, unwritten: Iterator[Unwritten | Failure]) -> None:
        try:
            self._side.begin()
            for place in itertools.cycle([_Place(pinned=self._side.is_apart) for _ in range(PLACES)]):
                self._room.acquire()
                if self._is_closed or (following := next(unwritten, None)) is None:
                    break
                self._brought.put(following if isinstance(following, Failure) else self._bring(following, place))
        except BaseException as error:
            self._brought.put(error)
        else:
            self._brought.put(None)

    def _bring(self, unwritten: Unwritten, place: _Place) -> Brought:
        if place.copied is not None:
            place.copied.synchronize()
        written = {name: place.tensor(name, *kind) for name, kind in unwritten.layout.items()}
        unwritten.write({name: tensor.numpy() for name, tensor in written.items()})
        fields, place.copied = self._side.send(written)
        return Brought(fields, split(fields, unwritten.numbers), place.copied)
