"""The limit and ourselves: a hand-written loop over tensors in memory, and Samerun's own loop, on one process or several."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from app.benchmarks.work import Work


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


def samerun(work: Work) -> None:
    """Train as `app.train` does, by its parts: all it starts is started, only the model is given."""
    # Imported here: the others are not to pay for it.
    from app import opening, session
    from app.batching import BatchPlan
    from app.launched import read
    from app.loop import train
    from app.runtime import Runtime
    from app.watchdog import Watchdog

    launched, recipe = read(os.environ), work.loaded.recipe
    runtime = Runtime(launched, BatchPlan.of(recipe, launched.world_size), clip_norm=recipe.optim.clip_norm)
    data = session.open_data(runtime, recipe)
    parts = session.agree(runtime, work.loaded, data)
    parts = dataclasses.replace(parts, model=work.model())
    place = runtime.from_main(tempfile.mkdtemp(prefix="run-", dir=work.task.folder))
    run_dir = opening.open_run_folder(runtime, work.loaded, place, trackers="none", origin=None, may_exist=False)
    training = session.prepare(runtime, work.loaded, data, parts, Path(run_dir), None)
    with training.control:
        with Watchdog(runtime, run_dir, timeout_s=540):
            ended = train(training)
        session.finish(training, data, run_dir, ended)
