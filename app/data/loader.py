"""The data loader: sample numbers in, whole batches out, copied to the device while it computes.

A sample number is `epoch * size + index`; it is all that a worker needs to make the sample, and all that the augmentation
needs to be the same anywhere. -1 is padding. A batch is a dict of tensors: the fields that `Samples.fetch` returns, and
`samples` int64 [B], the sample numbers. An array, `numbers`, has these on the host as well: only tensors go to the device.

A thread has each batch written into pinned memory, from which a device reads by itself, and has it copied on a stream beside
the one that computes. The pinned memory is a ring of a few places, each made once: pinning takes longer than copying.

Nothing is written over what is still read:
- A place of the ring is written again when the copy out of it is done: the thread waits for an event behind the copy.
- The stream that computes waits, on the device, for the same event before it uses the batch.
- The batch's memory on the device is the allocator's, which is told of the stream that computes (`record_stream`), and gives it
  to another batch when that stream is done with it. A ring there would be written over under those who keep a part of a batch.
All batches of a process are copied on one stream, since the allocator keeps memory for each stream apart.

What is raised where batches are made is raised, at its place, where they are used. As NVIDIA apex's
examples/imagenet/main_amp.py and timm's timm/data/loader.py do from the training thread;
docs.pytorch.org/docs/stable/notes/cuda.html ("CUDA streams"). On a CPU, torch's stand-ins for streams copy at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from app.data.draws import HostDraws
from app.data.samples import CHECK, Batch, Samples
from app.errors import DataError

TOGETHER_BYTES = 2 << 20
"""Size of small batches that are fetched together for a device: large against the cost of a fetch, small against memory."""


class Fetching(Dataset):
    """Samples as torch's DataLoader sees them: indexed by sample numbers, a whole batch at a time."""

    def __init__(self, source: Samples, *, seed: int | None) -> None:
        """`seed` seeds the random numbers; None: nothing is random, as in an evaluation."""
        self.source, self._seed = source, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, numbers: Any) -> Batch | DataError:
        """Return the batch of the given sample numbers (list or array of int64 [B]).

        An error is returned: raised in a worker, it would reach the user wrapped in two tracebacks.
        """
        samples = np.asarray(numbers, dtype=np.int64)
        indices = samples % len(self.source)  # of padding, the last one
        try:
            fields = self.source.fetch(indices, None if self._seed is None else HostDraws(self._seed, samples))
        except DataError as error:
            return DataError(f"{error}. {CHECK}")
        return {**fields, "samples": torch.from_numpy(samples), "numbers": samples}


@dataclass(frozen=True)
class InProcess:
    """One data rank's shares of global micro-batches, made where they are used, for samples that workers do not make sooner.

    Handing a batch over from a worker costs more than a look-up, and so does a DataLoader without workers (60-90 us a
    batch). The shares are those that Accelerate deals, contiguous and in the order of the ranks.
    """

    source: Samples
    batches: Iterable[np.ndarray]
    """Sample numbers, int64 [global micro-batch], which `data_ranks` divides."""
    seed: int | None
    """As in `Fetching`."""
    data_rank: int
    data_ranks: int
    together_bytes: int = 0
    """Size up to which small batches are fetched together, for `Ahead`: `numbers` is then int64 [batches, B], and the first
    dimension of a field is batches * B. 0: each batch is fetched alone."""

    def __iter__(self) -> Iterator[Batch | DataError]:
        fetching, count = Fetching(self.source, seed=self.seed), 1
        shares = (numbers.reshape(self.data_ranks, -1)[self.data_rank] for numbers in self.batches)
        for first in shares:
            group = [first, *itertools.islice(shares, count - 1)]
            batch = fetching.__getitems__(np.concatenate(group))
            if self.together_bytes and not isinstance(batch, DataError):
                batch["numbers"] = batch["numbers"].reshape(-1, len(first))
                count = max(1, self.together_bytes * len(group) // sum(field.nbytes for field in batch.values()))
            yield batch


def build_loader(source: Samples, batches: Any, *, seed: int | None, workers: int) -> DataLoader:
    """Return a loader over `batches`, a batch sampler of global micro-batches, for Accelerate to divide.

    For samples that are made one by one: so many worker processes do it; 0: this process. `seed` as in `Fetching`.
    """
    return DataLoader(
        Fetching(source, seed=seed),
        batch_sampler=batches,
        collate_fn=_unchanged,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_run,
    )


def num_workers(asked: int | None, cores: int, device: torch.device) -> int:
    """Return how many worker processes a training process with this many cores starts: as many as were asked for, if any were.

    Where the CPU trains, one core is kept for that. More than 16 never paid off in published measurements. For a device at
    least one: batches are brought there by a thread, which shares the generators that samples may draw from with the training.
    """
    least = 0 if device.type == "cpu" else 1
    return max(least, min(16, cores - 1 + least) if asked is None else asked)


def batches_of(loader: Iterable[Batch | DataError]) -> Generator[Batch]:
    """Yield the loader's batches. Raises DataError, with the worker's sentence, for a batch that could not be made."""
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


def _leave_signals_to_the_run(_worker: int) -> None:
    """Schedulers and launchers signal all processes of a run at once, and it still needs its batches until it has stopped."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


PLACES = 3
"""Places in the ring: one is written, one copied, one waits to be used. This many batches (or groups of small ones) are
ahead."""
_PATIENCE_S = 10.0
"""Time that the end of a training waits for its thread: longer than torch's DataLoader needs (5 s) to see that a worker
died."""
_SIGNAL_S = 0.1
"""An error may be that a worker process is gone. How it ended a signal tells the main thread, in torch's words, a bit later."""


class Ahead:
    """Batches on a device, each brought there while earlier ones are used. May be iterated over more than once."""

    def __init__(self, loader: Iterable[Batch | DataError], device: torch.device, *, side: Side | None = None) -> None:
        """`loader` gives batches on the host; `side` is what copies them, None: a stream of the device."""
        self._loader, self._side = loader, side or Side(device)

    def __iter__(self) -> Iterator[Batch]:
        on_host = iter(self._loader)
        # Here, not in the thread: what torch's DataLoader starts it starts now, and only the main thread learns of its death.
        first = next(on_host, None)
        if first is None:
            return
        line = _Line(itertools.chain([first], on_host), self._side)
        del on_host  # the thread alone may hold it: closed with it, its processes end
        try:
            while (brought := line.take()) is not None:
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
        """True if the device has its own memory."""

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

    def __init__(self, on_host: Iterator[Batch | DataError], side: Side) -> None:
        self._side, self._room, self._is_closed = side, threading.Semaphore(PLACES), False
        self._brought: SimpleQueue[Brought | BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(on_host,), name="feed", daemon=True)
        self._thread.start()

    def take(self) -> Brought | None:
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

    def _work(self, on_host: Iterator[Batch | DataError]) -> None:
        try:
            self._side.begin()
            for place in itertools.cycle([_Place(pinned=self._side.is_apart) for _ in range(PLACES)]):
                self._room.acquire()
                if self._is_closed or (following := next(on_host, None)) is None:
                    break
                self._brought.put(following if isinstance(following, DataError) else self._bring(following, place))
        except BaseException as error:
            self._brought.put(error)
        else:
            self._brought.put(None)

    def _bring(self, batch: Batch, place: _Place) -> Brought:
        if place.copied is not None:
            place.copied.synchronize()
        arrays = {name: field.numpy() for name, field in batch.items() if isinstance(field, Tensor)}
        written = {name: place.tensor(name, array.shape, array.dtype) for name, array in arrays.items()}
        for name, array in arrays.items():
            np.copyto(written[name].numpy(), array)  # in this thread: torch's pool is left to others
        fields, place.copied = self._side.send(written)
        numbers = np.atleast_2d(batch["numbers"])  # int64 [batches, B]: the batches lie together in each field
        pieces = [tensor.view(len(numbers), -1, *tensor.shape[1:]).unbind() for tensor in fields.values()]
        batches = [dict(zip((*fields, "numbers"), piece, strict=True)) for piece in zip(*pieces, numbers, strict=True)]
        return Brought(fields, batches, place.copied)
