"""The limit and ourselves: a hand-written loop over tensors in memory, and Samerun's own loop, on one process or several."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from app.data.loader import num_workers
from app.place import cores
from app.tasks.image_classification.data.pictures import PictureSource, Reader
from benchmarks.figures import LINEAR
from benchmarks.work import Tally, Work

_LONGEST_ROUND_S = 24 * 3600
"""The watchdog is to watch, as in any run, but not to take the turns of the others for a hang: with ten programs and a large
model they last many minutes."""


def hand_written(work: Work, *, fused: bool | None) -> None:
    """Train with nothing but torch; `fused` is AdamW's option, None its default. Several processes use DDP as it is."""
    images, labels = work.tensors(training=True)
    model = network = work.model()
    if work.world_size > 1:
        torch.distributed.init_process_group("gloo")
        network = nn.parallel.DistributedDataParallel(model)
    optimizer = work.optimizer(model, fused=fused)
    share = work.batch // work.world_size
    for _ in work.epochs():
        order = torch.randperm(len(images))
        for step in range(len(images) // work.batch):
            start = step * work.batch + work.rank * share
            picked = order[start : start + share]
            loss = F.cross_entropy(network(images[picked]), labels[picked])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = zip(*(tensor.split(work.batch) for tensor in work.tensors(training=False)), strict=True)
        _correct = sum(int((model(part).argmax(1) == truth).sum()) for part, truth in parts)


def on_device(work: Work) -> None:
    """Train with nothing but torch, as fast as it goes: bf16, channels_last, fused AdamW, on the accelerator if any."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = work.uncounted_model().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    network: nn.Module = torch.compile(model) if work.task.compiled else model  # type: ignore[assignment]
    work.count(network)
    optimizer = work.optimizer(model, fused=True)
    for images, labels in _synthetic(work, device) if work.task.synthetic_samples else _photographs(work, device):
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _synthetic(work: Work, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one and the same batch, which lies on the device, ready: no feed can be faster."""
    images = torch.randn(work.batch, work.channels, work.height, work.width, device=device)
    labels = torch.randint(work.classes, (work.batch,), device=device)
    return itertools.repeat((images.to(memory_format=torch.channels_last), labels))


def _photographs(work: Work, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random crops, flipped, of a folder of photographs, by torchvision as its references do it, in worker processes."""
    from torchvision import datasets
    from torchvision.transforms import v2

    recipe = work.loaded.recipe
    area = recipe.sections.augment.resized_crop_min_area or 1.0
    changes = [v2.RandomResizedCrop((work.height, work.width), (area, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    workers = num_workers(cores.of_this_process(1), device)
    tally = work.fed_by(workers)

    photographs = datasets.ImageFolder(Path(work.task.folder, "train"), v2.Compose(changes))
    loader: DataLoader = DataLoader(
        _TalliedImages(photographs, tally),
        work.batch,
        sampler=_Endless(len(photographs)),
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in work.statistics)
    for pixels, labels in loader:
        images = pixels.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
        yield images.div_(255).sub_(mean).div_(std), labels.to(device, non_blocking=True)


@dataclasses.dataclass(frozen=True)
class _Endless(Sampler[int]):
    """One epoch after the other, as Samerun's order has them: between epochs workers would have nothing to do."""

    size: int

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.size).tolist()


@dataclasses.dataclass(frozen=True)
class _TalliedImages(Dataset):
    """A data set of torchvision whose batches are counted."""

    images: Any
    tally: Tally

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.tally.add()
        return [self.images[index] for index in indices]


@dataclasses.dataclass(frozen=True)
class _TalliedReader:
    """A reader whose batches are counted."""

    read: Reader
    tally: Tally

    @property
    def labels(self) -> np.ndarray | None:
        return self.read.labels

    def __call__(self, indices: Sequence[int]) -> Iterable[tuple[torch.Tensor, int]]:
        self.tally.add()
        return self.read(indices)

    def file(self, index: int) -> bytes | None:
        return self.read.file(index)


def samerun(work: Work) -> None:
    """Train as `app.train` does, by its parts: all it starts is started. No recipe has the linear model, which is given."""
    # Imported here: the others are not to pay for it.
    from app import ending, opening, session, tasks
    from app.data.samples import Splits
    from app.guard.watchdog import Watchdog
    from app.loop import train
    from app.optim.from_recipe import Rule
    from app.place.launched import read
    from app.ranks.runtime import Runtime
    from app.recipe.batching import BatchPlan

    launched, recipe = read(os.environ), work.loaded.recipe
    runtime = Runtime(launched, BatchPlan.of(recipe, launched.world_size), clip_norm=recipe.optim.clip_norm)
    task, data = tasks.of(recipe), Splits(*work.data)
    if isinstance(data.train, PictureSource):
        tally = work.fed_by(num_workers(cores.of_this_process(launched.local_world_size), runtime.device))
        data = data._replace(train=dataclasses.replace(data.train, read=_TalliedReader(data.train.read, tally)))
    parts = session.agree(runtime, work.loaded, task, data)
    if work.task.model == LINEAR:
        model = work.uncounted_model()
        parts = dataclasses.replace(parts, model=model, rule=Rule.of(recipe.optim, model))
    place = runtime.from_main(tempfile.mkdtemp(prefix="run-", dir=work.task.folder))
    opened = opening.open_run_folder(runtime, work.loaded, task, data, place, trackers=(), origin=None, look_again=None)
    training = session.prepare(runtime, work.loaded, task, data, parts, opened)
    work.count(training.model)
    with training.control:
        with training.metrics.timed(), Watchdog(runtime, opened.claim, timeout_s=_LONGEST_ROUND_S):
            ended = train(training)
        ending.finish(training, data, opened, ended)
