"""Batches that a thread brings to a device: those of the plain feed, in their order, and no thread that outlives them.

On a CPU torch's stand-ins for streams copy at once. `Lagging` copies late, from a thread of its own, as a device does.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from processes import ONE_THREAD, SCRIPTS, Finished, Started, read, read_lines
from torch import Tensor
from torch.utils.data import DataLoader

from app.checkpoints import step_folders
from app.data import loader
from app.data.loader import PLACES, Ahead, Brought, Fetching, InProcess, Side
from app.data.order import EvalBatches, TrainBatches
from app.data.samples import Batch
from app.errors import DataError
from app.recipe import recipe_file
from app.tasks.image_classification.data.arrays import ArrayImages, Mapped, in_array
from app.tasks.image_classification.data.images import Images
from app.tasks.image_classification.data.open import open_data

CPU = torch.device("cpu")
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(torch.device("cuda", 0), id="cuda", marks=pytest.mark.gpu)]


class Lagging(Side):
    """A device that copies each batch some time after it was told to, and one after the other."""

    class Copied(threading.Event):
        def synchronize(self) -> None:
            self.wait()

    def __init__(self, chance: random.Random, *, longest_s: float) -> None:
        super().__init__(CPU)
        self._chance, self._longest_s = chance, longest_s
        self._told: SimpleQueue[tuple[Batch, Batch, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._copy)

    def __enter__(self) -> Lagging:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._told.put(None)
        self._thread.join()

    def _copy(self) -> None:
        while (told := self._told.get()) is not None:
            written, fields, copied = told
            time.sleep(self._chance.uniform(0, self._longest_s))
            for name, tensor in fields.items():
                tensor.copy_(written[name])
            copied.set()

    def send(self, written: Batch) -> tuple[Batch, Any]:
        fields = {name: torch.full_like(tensor, 77) for name, tensor in written.items()}
        copied = self.Copied()
        self._told.put((written, fields, copied))
        return fields, copied

    def receive(self, brought: Brought) -> None:
        brought.arrived.wait()


@functools.cache
def noise(side: int = 8) -> ArrayImages:
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(500, 3, side, side), dtype=np.uint8)
    return in_array(Mapped(images), generator.integers(10, size=500, dtype=np.int32), "0123456789", "noise")


def looked_up(source: ArrayImages, batch: int, *, steps: int = 40, together_bytes: int = 0) -> InProcess:
    return InProcess(source, order(len(source), batch, steps), 1, data_rank=0, data_ranks=1, together_bytes=together_bytes)


def fetched_by_workers(source: Images, numbers: Any, *, workers: int) -> DataLoader:
    fetching = Fetching(source, seed=None)
    return DataLoader(fetching, batch_sampler=numbers, collate_fn=loader._unchanged, num_workers=workers)


def order(size: int, batch: int, steps: int) -> TrainBatches:
    return TrainBatches(size=size, seed=1, global_batch_size=batch, micro_batches_per_step=1, first_step=0, last_step=steps)


def same(some: Batch, others: Batch) -> bool:
    assert some.keys() == others.keys() == {"images", "labels", "samples", "numbers"}
    assert [type(field) for field in some.values()] == [Tensor, Tensor, Tensor, np.ndarray]
    here, there = ([torch.as_tensor(batch[name]).cpu() for name in some] for batch in (some, others))
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(here, there, strict=True))


def same_all(found: list[Any], plain: list[Any]) -> bool:
    return all(same(one, other) for one, other in zip(found, plain, strict=True))


def counted(number: int, *, size: int = 4) -> Batch:
    """A batch that says which it is."""
    return {"samples": torch.full((size,), number), "numbers": np.full(size, number)}


def feeds() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert feeds() == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together_bytes", [0, 5000])
def test_looked_up_batches_are_those_of_the_plain_feed(device: torch.device, together_bytes: int) -> None:
    fed, plain = looked_up(noise(), 6, together_bytes=together_bytes), list(looked_up(noise(), 6))
    assert (len(plain), len(list(fed)) < 20) == (40, together_bytes > 0)
    ahead = Ahead(fed, device)
    for _ in range(2):  # an evaluation is fed by the same one each time
        found = list(ahead)
        assert {batch[name].device.type for batch in found for name in ("images", "labels", "samples")} == {device.type}
        assert same_all(found, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_batches_of_workers_are_those_of_the_plain_feed(device: torch.device) -> None:
    source = open_data(recipe_file.load("digits").recipe.sections)["test"]
    numbers = EvalBatches(size=len(source), batch_size=50)  # the last one is padded
    found = list(Ahead(fetched_by_workers(source, numbers, workers=2), device))
    assert same_all(found, list(InProcess(source, numbers, None, data_rank=0, data_ranks=1)))


@pytest.mark.parametrize(("producing_s", "copying_s", "using_s"), [(0, 3e-3, 0), (3e-3, 1e-3, 1e-3)])
def test_memory_is_not_written_while_a_slow_device_reads_it(
    chance: random.Random, producing_s: float, copying_s: float, using_s: float
) -> None:
    plain, kept = list(looked_up(noise(), 64, steps=60)), []

    def on_host() -> Iterator[Batch]:
        for batch in looked_up(noise(), 64, steps=60):
            time.sleep(chance.uniform(0, producing_s))
            assert not isinstance(batch, DataError)
            yield batch

    with Lagging(chance, longest_s=copying_s) as side:
        for batch, expected in zip(Ahead(on_host(), CPU, side=side), plain, strict=True):
            time.sleep(chance.uniform(0, using_s))
            assert same(batch, expected)
            kept.append(batch)
    assert same_all(kept, plain)  # those who keep a part of a batch, keep it as it was


class Squares:
    """Samples that are not looked up."""

    workers = is_array = False

    def __len__(self) -> int:
        return 20

    def fetch(self, indices: np.ndarray, draw: Any) -> dict[str, Tensor]:
        if 13 in indices:
            raise DataError("sample 13 is missing")
        return {"square": torch.from_numpy(indices**2)}


def test_samples_that_are_not_looked_up_are_fetched_where_they_are_used() -> None:
    numbers = [np.array([3, 24, 7, -1]), np.array([5, 13, 6, 8])]
    lost = "sample 13 is missing. `samerun data check` lists all samples that cannot be read"
    for rank, squares in enumerate(([[9, 16], lost], [[49, 361], [36, 64]])):
        fed = InProcess(Squares(), numbers, None, data_rank=rank, data_ranks=2)  # type: ignore[arg-type]
        assert [str(it) if isinstance(it, DataError) else it["square"].tolist() for it in fed] == squares
        ahead = iter(Ahead(fed, CPU))
        assert next(ahead)["square"].tolist() == squares[0]
        if rank == 0:
            with pytest.raises(DataError, match="sample 13 is missing"):
                next(ahead)
        else:
            assert [batch["square"].tolist() for batch in ahead] == squares[1:]


def test_sizes_may_change_and_nothing_is_also_a_feed() -> None:
    sizes = [3, 7, 7, 1, 12, 2, 2, 5]
    found = list(Ahead((counted(number, size=size) for number, size in enumerate(sizes)), CPU))
    assert [batch["samples"].tolist() for batch in found] == [[number] * size for number, size in enumerate(sizes)]
    assert list(Ahead([], CPU)) == []


def test_only_as_much_is_ahead_as_the_ring_has_places(chance: random.Random) -> None:
    begun, worst = 0, 0

    def on_host() -> Iterator[Batch]:
        nonlocal begun
        for number in range(100):
            begun += 1
            yield counted(number)

    for taken, _ in enumerate(Ahead(on_host(), CPU)):
        time.sleep(chance.uniform(0, 2e-3))
        worst = max(worst, begun - taken - 1)
    assert begun == 100
    assert 1 <= worst <= PLACES


@pytest.mark.parametrize("at", [0, 5])
def test_what_is_raised_in_the_thread_is_raised_in_the_loop_at_its_place(at: int) -> None:
    lost, found = OSError(5, "Input/output error", "/data/images.npy"), []

    def on_host() -> Iterator[Batch]:
        yield from map(counted, range(at))
        raise lost

    with pytest.raises(OSError, match=r"images\.npy") as caught:  # noqa: PT012 - the batches before it
        for batch in Ahead(on_host(), CPU):
            found.append(int(batch["samples"][0]))
    assert caught.value is lost
    assert caught.traceback[-1].name == "on_host"
    assert found == list(range(at))


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_killed_worker_is_told() -> None:
    """As torch tells it. What the thread meets, half of a batch, is not the cause."""
    source = open_data(recipe_file.load("digits").recipe.sections)["train"]
    fed = iter(Ahead(fetched_by_workers(source, order(len(source), 8, 10**6), workers=1), CPU))
    next(fed)
    (worker,) = (process for process in torch.multiprocessing.active_children())
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (is killed by signal|exited unexpectedly)"):
        for _ in fed:
            pass


def test_the_thread_ends_whenever_the_loop_does(chance: random.Random) -> None:
    for taken in (*range(PLACES + 3), *range(PLACES + 3)):
        fed = loader.batches_of(Ahead(map(counted, range(PLACES + 2)), CPU))
        for _, batch in zip(range(taken), fed, strict=False):
            assert batch["samples"].numel() == 4
        time.sleep(chance.choice((0, 1e-4, 1e-3)))
        fed.close()
        assert feeds() == []


def test_a_disk_that_stands_still_does_not_keep_the_end_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_PATIENCE_S", 0.2)
    answers = threading.Event()

    def stuck() -> Iterator[Batch]:
        yield counted(0)
        answers.wait()

    fed = loader.batches_of(Ahead(stuck(), CPU))
    next(fed)
    start_s = time.perf_counter()
    fed.close()
    assert 0.1 < time.perf_counter() - start_s < 2
    (left,) = feeds()
    assert left.daemon
    answers.set()
    left.join()


# On a GPU: bits, and memory of the device that is used again too early.


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", [0, 7])
def test_device_memory_is_not_given_away_while_the_computing_stream_is_behind(keeps: int) -> None:
    fed = looked_up(noise(64), 128, steps=150)
    seen, kept = [], []
    for number, batch in enumerate(Ahead(fed, torch.device("cuda", 0))):
        if number % 10 == 0:
            torch.cuda._sleep(60_000_000)  # some 30 ms at 2 GHz: the host is far ahead of the stream that computes
        seen.append({name: field.clone() if isinstance(field, Tensor) else field for name, field in batch.items()})
        kept = [*kept, batch["samples"]][-keeps:] if keeps else []
    plain = list(fed)
    assert same_all(seen, plain)
    assert [tensor.tolist() for tensor in kept] == [batch["samples"].tolist() for batch in plain[len(plain) - keeps :]]


# Whole runs, on the CPU, whose batches a thread brings.

RUN = ("--trackers", "none", "--recipe", "digits", "train.epochs=2", "log.every_steps=1", "log.samples=true")


def run(folder: Path, *arguments: str, ahead: bool = True) -> Finished:
    program = [str(SCRIPTS / "ahead.py")] if ahead else ["-m", "app.train"]
    return Started([sys.executable, *program, "--run-dir", str(folder), *RUN, *arguments], env=ONE_THREAD).wait()


def learnt(folder: Path) -> list[Any]:
    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl")]
    return [losses, read_lines(folder / "samples.jsonl"), read(folder / "result.json")["test_loss"]]


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_run_is_the_same_bit_for_bit_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run(tmp_path / "plain", ahead=False).check()
    run(tmp_path / "ahead", "checkpoint.every_steps=20").check()
    assert learnt(tmp_path / "ahead") == learnt(tmp_path / "plain")
    (tmp_path / "ahead" / "result.json").unlink()
    shutil.rmtree(step_folders.committed(tmp_path / "ahead")[0])
    assert "resumed from" in run(tmp_path / "ahead", "--resume", "auto").check().output
    assert learnt(tmp_path / "ahead") == learnt(tmp_path / "plain")
