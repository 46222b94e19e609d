"""A user's file around somebody's Dataset, in real processes: the same run on any number of them, and of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import read, read_lines, run, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

TASK = """
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from app.task import Loss, Samples


class Points(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()), np.random.default_rng(index).random()])
        return self.x[index] + noise, self.x[index].sum().float()


class Line:
    def samples(self, split):
        return Samples.of(Points(*{"train": (101, 0), "validation": (37, 1), "test": (13, 2)}[split]), names=("x", "y"))

    def model(self, metadata):
        return nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1), nn.Flatten(0))

    def loss(self, model, batch):
        return Loss(F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"]), {"mean": (batch["x"].sum(), len(batch["x"]))})


task = Line
"""


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in ("step", "loss", "mean", "grad_norm")} for line in read_lines(run_dir / "metrics.jsonl")]


def test_a_task_of_twenty_lines_gives_the_same_run_on_any_processes_and_workers(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "line.yaml").write_text(
        "task: line.py\ntrain: {global_batch_size: 16, steps: 12, max_micro_batch: 8}\nlog: {every_steps: 1, samples: true}\n"
    )
    topologies = {"none": ("cpu", 1, 0), "three": ("cpu", 1, 3), "ranks": ("multi_gpu", 2, 1), "sharded": ("fsdp2", 2, 0)}
    runs = {}
    for name, (preset, processes, workers) in topologies.items():
        arguments = ("--recipe", str(tmp_path / "line.yaml"), "--workers", str(workers))
        train(preset, tmp_path / name, *arguments, processes=processes).check()
        runs[name] = lines(tmp_path / name)
        assert read_lines(tmp_path / name / "samples.jsonl") == read_lines(tmp_path / "none" / "samples.jsonl")
    assert len(runs["none"]) == 12
    assert runs["three"] == runs["none"]
    for name in ("ranks", "sharded"):
        for ours, theirs in zip(runs["none"], runs[name], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5)
    scores = [{key: value for key, value in read(tmp_path / name / "result.json").items() if "_loss" in key} for name in runs]
    assert set(scores[0]) == {"validation_loss", "test_loss"}
    assert scores[1] == scores[0]
    assert all(other == pytest.approx(scores[0], rel=1e-5) for other in scores)
    again = run("multi_gpu", 2, "app.evaluate", str(tmp_path / "none"), "--json", "--workers", "2").check().output
    told = json.loads(next(line for line in again.splitlines() if line.startswith("{")))
    assert told["loss"] == pytest.approx(scores[0]["test_loss"], rel=1e-5)
