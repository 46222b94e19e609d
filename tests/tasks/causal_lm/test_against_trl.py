"""trl's SFTTrainer, given the same prompts and answers as texts, has the same losses: tokens, masks and rows are then right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from languages import save_network
from processes import SCRIPTS, read, read_lines, run, train
from small_tokenizer import chapters, write_tokenizer

from app.tasks.causal_lm.data import command

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

STEPS, LENGTH = 10, 512
RECIPE = f"""
task: causal_lm
data: {{document_masks: true}}
train: {{global_batch_size: 4, steps: {STEPS}, evaluate_every_epochs: 0}}
optim: {{name: adamw, lr: 0.001, weight_decay: 0.0, clip_norm: 1.0, schedule: constant}}
log: {{every_steps: 1, samples: true}}
"""


def examples() -> list[dict[str, str]]:
    """Prompts and completions cut out of the embedded book: completions of 1 to 80 words."""
    words, random = " ".join(chapters()).split(), np.random.default_rng(3)
    found = []
    for _ in range(300):
        prompt, answer, begin = (
            int(random.integers(3, 20)),
            round(80 ** random.random()),
            int(random.integers(len(words) - 200)),
        )
        cut = begin + prompt
        found.append({"prompt": " ".join(words[begin:cut]), "completion": " " + " ".join(words[cut : cut + answer])})
    return found


def documents_of(folder: Path, row: int) -> list[int]:
    """The documents of a packed row, read from the token folder's files."""
    spans = np.fromfile(folder / "train.pieces", "<i8").reshape(-1, 2)
    rows, begins = np.fromfile(folder / "train.rows", "<i8"), np.fromfile(folder / "train.documents", "<u8")
    found = np.searchsorted(begins, spans[rows[row] : rows[row + 1], 0]).tolist()
    assert np.isin(spans[rows[row] : rows[row + 1], 0], begins).all(), "a document was cut"
    return [int(document) for document in found]


def test_losses_are_those_of_sft(tmp_path: Path) -> None:
    pairs, folder = examples(), tmp_path / "tokens"
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    options = ("--out", str(folder), "--tokenizer", tokenizer, "--prompts", "--sequence-length", str(LENGTH))
    assert command.main(("tokenize", str(tmp_path / "pairs.jsonl"), *options)) == 0
    network = save_network(tmp_path / "network", vocab_size=600)

    (tmp_path / "ours.yaml").write_text(RECIPE)
    given = (f"data.path={folder}", f"model.path={network}", f"train.init_from={network}")
    train("cpu", tmp_path / "run", "--recipe", str(tmp_path / "ours.yaml"), *given).check()
    ours = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    of_steps = [line["samples"] for line in read_lines(tmp_path / "run" / "samples.jsonl")]
    steps = [[document for row in rows for document in documents_of(folder, row)] for rows in of_steps]
    assert len({len(step) for step in steps}) > 3, "the answers are too even to show anything"

    job = {"model": str(network), "tokenizer": tokenizer, "examples": pairs, "steps": steps, "lr": 0.001, "clip_norm": 1.0,
           "scratch": str(tmp_path / "scratch"), "out": str(tmp_path / "out.json")}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    run("cpu", 1, str(SCRIPTS / "trl_sft.py"), str(tmp_path / "job.json"), env={"HF_HUB_OFFLINE": "1"}).check()
    theirs = read(tmp_path / "out.json")
    print(f"largest relative difference {max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)):.1e}")
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < 0.95 * ours[0]
