"""transformers' Trainer, fed with the same rows from the same weights, has the same losses: nobody here wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from languages import rows, save_network, write_answers
from processes import SCRIPTS, read, read_lines, run, train

pytestmark = [pytest.mark.multiproc]

STEPS, BATCH, LENGTH = 20, 8, 128
RECIPE = f"""
task: causal_lm
data: {{sequence_length: {LENGTH}}}
train: {{global_batch_size: {BATCH}, steps: {STEPS}, evaluate_every_epochs: 0}}
optim: {{name: adamw, lr: 0.003, betas: [0.9, 0.95], weight_decay: 0.1, clip_norm: 0.5, final_lr_ratio: 0}}
log: {{every_steps: 1, samples: true}}
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different counts of targets: answers of 1 to 200 tokens."""
    return write_answers(tmp_path_factory.mktemp("texts") / "answers")


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("gpt2", "qwen3_moe")),
        *(pytest.param(it, marks=pytest.mark.long) for it in ("mixtral", "olmoe", "qwen2_moe")),
    ],
)
def test_losses_are_those_of_the_trainer(answers: Path, tmp_path: Path, architecture: str) -> None:
    network = save_network(tmp_path / "network", architecture)
    (tmp_path / "ours.yaml").write_text(RECIPE)
    given = (f"data.path={answers}", f"model.path={network}", f"train.init_from={network}")
    train("cpu", tmp_path / "run", "--recipe", str(tmp_path / "ours.yaml"), *given).check()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    order = [index for line in read_lines(tmp_path / "run" / "samples.jsonl") for index in line["samples"]]
    tokens, counted = rows(answers, "train", LENGTH)
    assert len(order) == STEPS * BATCH
    counts = counted[order].reshape(STEPS * BATCH, -1).sum(1)
    assert counts.min() < 0.3 * counts.max(), "the rows weigh too much alike to show anything"
    np.savez(tmp_path / "rows.npz", tokens=tokens[order], counted=counted[order])
    job = {"model": str(network), "rows": str(tmp_path / "rows.npz"), "batch": BATCH, "steps": STEPS}
    job |= {"scratch": str(tmp_path / "scratch"), "out": str(tmp_path / "out.json")}
    for accumulation in (1, 2):
        (tmp_path / "job.json").write_text(json.dumps({**job, "accumulation": accumulation}))
        run("cpu", 1, str(SCRIPTS / "hf_trainer.py"), str(tmp_path / "job.json")).check()
        theirs = read(tmp_path / "out.json")
        for name in ("loss", "grad_norm", "learning_rate"):
            assert [line[name] for line in lines] == pytest.approx(theirs[name], rel=1e-5)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
