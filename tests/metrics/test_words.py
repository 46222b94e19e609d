"""What a task counts that is not samples, and the texts that its model writes: the same on any topology and over a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import read, read_lines, run, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.reports import past_run, report

TASK = """
import torch
from torch import nn
from torch.nn import functional as F

from app.task import Loss, Samples

WORDS = "nought <one> two three four five six seven eight nine".split()


class Counting:
    count_unit = "words"

    def samples(self, split):
        begin = torch.arange(40) % 10
        return None if split == "test" else Samples.of({"begin": begin, "next": (begin + 1) % 10, "words": 1 + begin % 3})

    def count(self, batch):
        return batch["words"].sum()

    def model(self, metadata):
        return nn.Sequential(nn.Embedding(10, 16), nn.Dropout(0.1), nn.Linear(16, 10))

    def loss(self, model, batch):
        losses = F.cross_entropy(model(batch["begin"]), batch["next"], reduction="none")
        return Loss.of((losses * batch["words"]).sum(), batch["words"].sum())

    def generate_samples(self, model, batch):
        assert not torch.is_grad_enabled()
        words, drawn = [batch["begin"]], torch.rand(()).item()
        for _ in range(4):  # each word from the one before
            words.append(model(words[-1]).argmax(1))
        texts = [" ".join(WORDS[word] for word in row) for row in torch.stack(words, 1).tolist()]
        return [(f"begun with {text.split()[0]}", f"{text}\\n\\x07 {drawn:.6f}") for text in texts]


task = Counting
"""


@pytest.mark.multiproc
def test_words_and_texts_are_the_same_on_any_topology_and_over_a_stop(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(TASK)
    (tmp_path / "counting.yaml").write_text(
        "task: counting.py\noptim: {lr: 0.05, schedule: constant}\nlog: {every_steps: 10, samples: true}\n"
        "train: {global_batch_size: 8, max_micro_batch: 4, steps: 30, evaluate_every_steps: 10, validation_fraction: null}\n"
        "checkpoint: {every_steps: 15}\n"
    )
    recipe = ("--recipe", str(tmp_path / "counting.yaml"))
    alone, other = tmp_path / "alone", tmp_path / "other"
    output = train("cpu", alone, *recipe).check().output
    assert " words/s" in output
    assert "samples/s" not in output
    sharded = ("app.train", "--run-dir", str(other), "--trackers", "tensorboard", "--resume", "auto", *recipe)
    run("fsdp2", 2, *sharded, "train.steps=15").check()  # evaluates after its last step, which the longer run does not
    run("fsdp2", 2, *sharded).check()

    for run_dir in (alone, other):
        seen, total = {}, 0
        for line in read_lines(run_dir / "samples.jsonl"):
            total += sum(1 + sample % 40 % 10 % 3 for sample in line["samples"])
            seen[line["step"]] = total
        lines = read_lines(run_dir / "metrics.jsonl")
        for line in (*lines, *read_lines(run_dir / "evaluations.jsonl")):
            assert line["words_seen"] == seen[line["step"]]
    *_, before, last = lines
    assert last["words_per_s_per_device"] == pytest.approx(last["words_per_s"] / 2)
    new = (last["words_seen"] - before["words_seen"]) / (10 * 8)
    assert last["words_per_s"] == pytest.approx(new * last["samples_per_s"])
    result = read(other / "result.json")
    assert result["words_seen"] == seen[30]
    assert result["words_per_s"] == pytest.approx((seen[30] - seen[15]) / result["training_s"])

    texts = [{key: line[key] for key in ("step", "title", "text")} for line in read_lines(alone / "texts.jsonl")]
    assert [line["step"] for line in texts] == [10] * 4 + [20] * 4 + [30] * 4
    *_, text = texts
    assert (text["title"], text["text"].split("\n")[0]) == ("begun with three", "three four five six seven")
    assert len({line["text"].split()[-1] for line in texts}) == 1  # torch's generator draws the same each time
    there = [{key: line[key] for key in ("step", "title", "text")} for line in read_lines(other / "texts.jsonl")]
    assert [line for line in there if line["step"] == 30] == texts[-4:]
    assert [line["step"] for line in there] == [10] * 4 + [15] * 4 + [20] * 4 + [30] * 4

    events = EventAccumulator(str(other / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    found = events.Tensors("begun with three/text_summary")
    assert [event.step for event in found] == [10, 15, 20, 30]
    assert found[-1].tensor_proto.string_val[0].decode().startswith("    three four five six seven\n")

    html, complaints = report.render(past_run.read(alone), 0.0)
    assert complaints == []
    assert "What the model wrote" in html
    assert html.index("After step 30") < html.index("After step 10")
    assert "&lt;one&gt; two three four five\n\ufffd" in html
