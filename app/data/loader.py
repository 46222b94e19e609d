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

What was raised where batches are made is raised, at its place, where they are used. As NVIDIA apex's
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
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from app.data.draws import HostDraws
from app.data.samples import CHECK, Batch, Layout, LooksUp, Samples
from app.environment import host
from app.errors import DataError

_TOGETHER_BYTES = 2 << 20
"""Samples that are looked up in one go: enough to forget what one look-up costs, few enough that nobody waits for it."""


@dataclass(frozen=True)
class Failure:
    """What a worker sends instead of a batch: raised there, the error would reach the user wrapped in two tracebacks."""

    text: str


class Fetching(Dataset):
    """Samples as torch's DataLoader sees them: indexed by sample numbers, a whole batch at a time."""

    def __init__(self, source: Samples, *, seed: int | None) -> None:
        """`seed` is that of what is random; None: nothing is, as in an evaluation."""
        self.source, self._seed = source, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, numbers: Any) -> Batch | Failure:
        """Return the batch of the given sample numbers (list or array of int64 [B])."""
        samples = np.asarray(numbers, dtype=np.int64)
        indices = samples % len(self.source)  # of padding, the last one
        try:
            fields = self.source.fetch(indices, None if self._seed is None else HostDraws(self._seed, samples))
        except DataError as error:
            return Failure(f"{error}. {CHECK}")
        return {**fields, "samples": torch.from_numpy(samples), "numbers": samples}


@dataclass(frozen=True)
class Unwritten:
    """Batches of one size that are made where their memory is."""

    layout: Layout
    """Shape and type of each field, of all batches together."""
    numbers: np.ndarray
    """Sample numbers, int64 [batches, B], which stay on the host; the first dimension of a field is batches * B."""
    write: Callable[[Mapping[str, np.ndarray]], None]
    """Writes the fields into arrays of these shapes and types."""


class InProcess:
    """One data rank's shares of global micro-batches, made where they are used, for samples that workers do not make sooner.

    Handing a batch over from a worker costs more than a look-up, and so does a DataLoader without workers (60-90 us a
    batch). The shares are those that Accelerate deals, contiguous and in the order of the ranks. For a device, small ones are
    looked up several at a time, which costs hardly more than one.
    """

    def __init__(
        self, source: Samples, batches: Iterable[np.ndarray], *, seed: int | None, data_rank: int, data_ranks: int
    ) -> None:
        """`batches` gives sample numbers, int64 [global micro-batch], which `data_ranks` divides; `seed` as in `Fetching`."""
        self._fetching, self._batches = Fetching(source, seed=seed), batches
        self._data_rank, self._data_ranks = data_rank, data_ranks

    def __iter__(self) -> Iterator[Batch | Failure]:
        return map(self._fetching.__getitems__, self._shares())

    def unwritten(self) -> Iterator[Unwritten | Failure]:
        """Return the batches, in groups if they are looked up, for memory that already exists."""
        source = self._fetching.source
        return self._looked_up(source) if isinstance(source, LooksUp) else unwritten(self)

    def _shares(self) -> Iterator[np.ndarray]:
        return (numbers.reshape(self._data_ranks, -1)[self._data_rank] for numbers in self._batches)

    def _looked_up(self, source: LooksUp) -> Iterator[Unwritten]:
        fields, shares = source.layout, self._shares()
        sample_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
        for first in shares:
            most = max(1, _TOGETHER_BYTES // (len(first) * sample_bytes))
            samples = np.concatenate([first, *itertools.islice(shares, most - 1)])
            layout = {name: ((len(samples), *shape), dtype) for name, (shape, dtype) in fields.items()}
            layout["samples"] = samples.shape, samples.dtype
            yield Unwritten(layout, samples.reshape(-1, len(first)), functools.partial(self._write, source, samples))

    def _write(self, source: LooksUp, samples: np.ndarray, memory: Mapping[str, np.ndarray]) -> None:
        source.fetch_into(samples % len(self._fetching), memory)  # of padding, the last one
        memory["samples"][:] = samples


def unwritten(loader: Iterable[Batch | Failure]) -> Iterator[Unwritten | Failure]:
    """Yield the batches of worker processes, for memory that already exists."""
    for batch in loader:
        if isinstance(batch, Failure):
            yield batch
        else:
            arrays = {name: field.numpy() for name, field in batch.items() if isinstance(field, Tensor)}
            layout = {name: (array.shape, array.dtype) for name, array in arrays.items()}
            yield Unwritten(layout, batch["numbers"][None], functools.partial(_copy, arrays))


def _copy(arrays: Mapping[str, np.ndarray], memory: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        np.copyto(memory[name], array)  # in this thread: torch's pool is left to others


def build_loader(source: Samples, batches: Any, *, seed: int | None, workers: int) -> DataLoader:
    """Return a loader over `batches`, a batch sampler of global micro-batches, for Accelerate to divide.

    For samples that are made one by one: so many worker processes do it; 0: this process. `seed` as in `Fetching`.
    """
    # Of more workers than cores, which were asked for (`workers_of`).
    warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    return DataLoader(
        Fetching(source, seed=seed),
        batch_sampler=batches,
        collate_fn=_unchanged,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_run,
    )


def workers_of(asked: int | None, *, local_world_size: int, device: torch.device) -> int:
    """Return how many worker processes this process starts: as many as were asked for, or else as its cores allow.

    Beside a device at least one: batches are brought there by a thread (`transfer`), which shares the generators that samples
    may draw from with the training.
    """
    if asked is not None:
        return asked if device.type == "cpu" else max(1, asked)
    return num_workers(host.usable(local_world_size), device)


def num_workers(own_cores: int, device: torch.device) -> int:
    """Return how many worker processes one training process may start that has this many cores.

    Where the CPU trains, one is kept for that. More than 16 never paid off in published measurements.
    """
    return max(0, min(16, own_cores - (1 if device.type == "cpu" else 0)))


def remedy(source: Samples, *, asked: int | None, local_world_size: int, device: torch.device) -> str:
    """Return what helps where training waits for these samples; `asked` as in `workers_of`."""
    if source.workers:
        workers = workers_of(asked, local_world_size=local_world_size, device=device)
        text = f"worker processes that make samples: {workers}; give the job more cores (--cpus-per-task) or other --workers"
    else:
        text = "the disk is slow; give the job more memory, so that the system can cache the files"
    own = getattr(source, "remedy", "")
    return f"{text}, or {own}" if own else text


def batches_of(loader: Iterable[Batch | Failure]) -> Generator[Batch]:
    """Yield the loader's batches. Raises DataError, with the worker's sentence, for a batch that could not be made."""
    for batch in loader:
        if isinstance(batch, Failure):
            raise DataError(batch.text)
        yield batch


def _leave_signals_to_the_run(_worker: int) -> None:
    """Schedulers and launchers signal all processes of a run at once, and it still needs its batches until it has stopped."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


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
        numbers = unwritten.numbers  # int64 [batches, B]: the batches lie together in each field
        pieces = [tensor.view(len(numbers), -1, *tensor.shape[1:]).unbind() for tensor in fields.values()]
        batches = [dict(zip((*fields, "numbers"), batch, strict=True)) for batch in zip(*pieces, numbers, strict=True)]
        return Brought(fields, batches, place.copied)
