"""What a task counts that is not samples: exact over all starts of a run, under its own name everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import read, read_lines, train

pytestmark = pytest.mark.multiproc

TASK = """
import numpy as np
import torch
from torch import nn

from app.task import Loss, Samples

LENGTHS = np.random.default_rng(0).integers(0, 9, 64)


class Speech:
    count_unit = "words"

    def samples(self, split):
        x = torch.randn(64, 9, 4, generator=torch.Generator().manual_seed(0))
        return Samples.of({"x": x, "length": torch.from_numpy(LENGTHS)}) if split != "test" else None

    def count(self, batch):
        return batch["length"].sum()

    def model(self, metadata):
        return nn.Linear(4, 1)

    def loss(self, model, batch):
        valid = torch.arange(9) < batch["length"][:, None]
        return Loss.of((model(batch["x"]).squeeze(-1).square() * valid).sum(), batch["length"].sum())


task = Speech
"""


def test_words_are_counted_exactly_over_all_starts(tmp_path: Path) -> None:
    (tmp_path / "speech.py").write_text(TASK)
    (tmp_path / "speech.yaml").write_text(
        "task: speech.py\ntrain: {global_batch_size: 8, steps: 20, max_micro_batch: 2, evaluate_every_steps: 3}\n"
        "log: {every_steps: 3, samples: true}\ncheckpoint: {every_steps: 4}\noptim: {schedule: constant}\n"
    )
    run_dir = tmp_path / "run"
    arguments = ("--recipe", str(tmp_path / "speech.yaml"), "--resume", "auto")
    train("multi_gpu", run_dir, *arguments, "train.steps=7", processes=2).check()
    finished = train("cpu", run_dir, *arguments).check()
    assert " words/s" in finished.output
    assert "samples/s" not in finished.output

    names = {}
    exec(TASK, names)  # the lengths that the task has drawn
    seen, total = {}, 0
    for line in read_lines(run_dir / "samples.jsonl"):
        total += int(names["LENGTHS"][[sample % 64 for sample in line["samples"]]].sum())
        seen[line["step"]] = total
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 6, 7, 9, 12, 15, 18, 20]
    for line in (*lines, *read_lines(run_dir / "evaluations.jsonl")):
        assert line["words_seen"] == seen[line["step"]]
    one, *_, other = lines
    assert one["words_per_s_per_device"] == pytest.approx(one["words_per_s"] / 2)
    new = (other["words_seen"] - lines[-2]["words_seen"]) / (2 * 8)
    assert other["words_per_s"] == pytest.approx(new * other["samples_per_s"])
    result = read(run_dir / "result.json")
    assert result["words_seen"] == seen[20]
    assert result["words_per_s"] == pytest.approx((seen[20] - seen[7]) / result["training_s"])
    assert read(run_dir / "run.json")["unit"] == "words"
