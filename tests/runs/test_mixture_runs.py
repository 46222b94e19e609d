"""A mixture of three texts of very different size, over phases, is the same run on every topology and after each resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from languages import write_answers
from processes import losses, read, read_lines, train

from app.checks.verify import verify
from app.errors import CheckpointError
from app.tasks.causal_lm.data.store import embedded_documents
from app.tasks.causal_lm.data.token_writer import writing
from app.tasks.causal_lm.data.tokenizers import Bytes

pytestmark = pytest.mark.multiproc
LONG = pytest.mark.long

BATCH, STEPS, LENGTH = 8, 20, 16
RECIPE = f"""
task: causal_lm
data:
  sequence_length: {LENGTH}
  sources:
  - {{path: SMALL, weight: 0.7, name: small}}
  - {{path: ANSWERS, weight: 0.2, name: answers}}
  - {{path: LARGE, weight: 0.1, name: large}}
  phases: [{{from_step: 12, weights: {{small: 1, answers: 1, large: 2}}}}]
  mixture_window: 50
model: {{architecture: gpt2, hidden_size: 32, layers: 2, heads: 4, dropout: 0.1}}
train: {{global_batch_size: {BATCH}, steps: {STEPS}}}
optim: {{name: adamw, lr: 0.003, clip_norm: 1.0, warmup_steps: 3, schedule: constant}}
log: {{every_steps: 1, samples: true}}
"""
SIZES = {"small": 10, "large": 100_000}
MARKS = {
    ("multi_gpu", 2, 2): (), ("cpu", 1, 2): LONG, ("multi_gpu", 2, 1): LONG, ("multi_gpu", 4, 1): LONG,
    ("deepspeed_zero2", 2, 1): LONG, ("deepspeed_zero3", 2, 1): LONG, ("deepspeed_zero3", 2, 2): LONG, ("fsdp2", 2, 1): LONG,
    ("fsdp2", 4, 1): LONG, ("hsdp", 4, 1): LONG,
}  # fmt: skip
CHAIN = [("multi_gpu", 2, 7), ("fsdp2", 2, 15), ("deepspeed_zero2", 2, STEPS)]
REPLICAS = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}}
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 10 and 100,000 rows and about 1,000 rows of answers, and the recipe that mixes them."""
    folder, tokenizer = tmp_path_factory.mktemp("texts"), Bytes()
    text = tokenizer.document(b" ".join(embedded_documents()["train"]))
    for name, rows in SIZES.items():
        with writing(folder / name, tokenizer.about, tokenizer.files(), token_bytes=tokenizer.token_bytes) as writer:
            for split, size in (("train", rows * LENGTH + 1), ("validation", 100)):
                tokens = np.resize(text, size)
                writer.append(split, tokens, np.array([size]), text_bytes=size)
    write_answers(folder / "answers", pairs=800, sequence_length=LENGTH, longest=12)
    recipe = RECIPE
    for name in ("small", "answers", "large"):
        recipe = recipe.replace(name.upper(), str(folder / name))
    (folder / "mixture.yaml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    train("cpu", folder / "alone", "--recipe", str(folder / "mixture.yaml"), processes=1).check()
    return folder / "alone"


def assert_same(run_dir: Path, reference: Path) -> None:
    assert read_lines(run_dir / "samples.jsonl") == read_lines(reference / "samples.jsonl")
    for name in ("learning_rate", "tokens_seen", "tokens_by_source", "tokens_seen_by_source"):
        assert losses(run_dir, name) == losses(reference, name)
    assert losses(run_dir) == pytest.approx(losses(reference), rel=1e-5)
    results = [read(it / "result.json") for it in (run_dir, reference)]
    assert results[0]["tokens_seen_by_source"] == results[1]["tokens_seen_by_source"]
    assert results[0]["validation_loss"] == pytest.approx(results[1]["validation_loss"], rel=1e-5)
    verdict, _ = verify(run_dir)
    assert (verdict.is_good, verdict.last_step) == (True, STEPS), verdict


def test_shares_are_exact_and_each_source_is_counted(alone: Path) -> None:
    lines = read_lines(alone / "samples.jsonl")
    rows = [(source, row) for line in lines for source, row in line["rows"]]
    assert [number for line in lines for number in line["samples"]] == [*range(BATCH * STEPS)]
    phase = 11 * BATCH
    for first, shares in ((0, (35, 10, 5)), (phase, (13, 12, 25))):  # 12.5, 12.5 and 25
        window = [source for source, _ in rows[first : first + 50]]
        assert tuple(window.count(name) for name in ("small", "answers", "large")) == shares
    small = [row for source, row in rows if source == "small"]
    assert [sorted(small[start : start + 10]) for start in range(0, 60, 10)] == [[*range(10)]] * 6
    assert small[:10] != small[10:20]
    result, last = read(alone / "result.json"), read_lines(alone / "metrics.jsonl")[-1]
    counts = result["tokens_seen_by_source"]
    assert counts == last["tokens_seen_by_source"]
    assert counts["small"] == LENGTH * len(small)
    assert counts["large"] == LENGTH * sum(source == "large" for source, _ in rows)
    assert sum(counts.values()) == result["tokens_seen"]
    spans = [line for line in read_lines(alone / "ledger.jsonl") if line["event"] == "steps"]
    assert {name: sum(sum(span["sources"][name]) for span in spans) for name in counts} == counts


@pytest.mark.parametrize("topology", [pytest.param(it, marks=marks) for it, marks in MARKS.items()], ids=str)
def test_a_run_is_the_same(alone: Path, folder: Path, topology: tuple[str, int, int], tmp_path: Path) -> None:
    preset, processes, accumulation = topology
    words = ("--recipe", str(folder / "mixture.yaml"), f"train.max_micro_batch={BATCH // (processes * accumulation)}")
    train(preset, tmp_path / "run", *words, processes=processes, env=REPLICAS.get(preset)).check()
    assert read(tmp_path / "run" / "run.json")["accumulation"] == accumulation
    assert_same(tmp_path / "run", alone)


def test_a_resumed_run_reads_the_rows_of_the_undisturbed_one(alone: Path, folder: Path, tmp_path: Path) -> None:
    """The phase is given after the first start, and the texts are elsewhere in the last one."""
    recipe = (folder / "mixture.yaml").read_text()
    for preset, processes, steps in CHAIN:
        given = recipe.replace("phases:", "# phases:") if steps < 12 else recipe
        if steps == STEPS:
            for name in ("small", "large"):
                shutil.copytree(folder / name, tmp_path / f"{name}-copy")
            given = given.replace(f"{folder}/small", f"{tmp_path}/small-copy").replace(
                f"{folder}/large", f"{tmp_path}/large-copy"
            )
        (tmp_path / "mixture.yaml").write_text(given)
        words = ("--recipe", str(tmp_path / "mixture.yaml"), f"train.steps={steps}", "--resume", "auto")
        train(preset, tmp_path / "run", *words, processes=processes).check()
    assert_same(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data.phases=[{from_step: 12, weights: {small: 1, answers: 1, large: 3}}]"],
         "which differ in steps that were taken already: change later steps only"),
        (["data.sources=[{path: SMALL, weight: 0.6}, {path: ANSWERS, weight: 0.3}, {path: LARGE, weight: 0.1}]"],
         "data.sources was [{'weight': 0.7"),
        (["data.sources=[{path: LARGE, weight: 0.7, name: small}, {path: ANSWERS, weight: 0.2, name: answers}, "
          "{path: LARGE, weight: 0.1, name: large}]"], "training data of small was '10 samples"),
        (["data.mixture_window=60"], "data.mixture_window was 50 and is 60"),
    ],
)  # fmt: skip
def test_another_mixture_is_another_run(alone: Path, folder: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    for name in ("small", "answers", "large"):
        words = [word.replace(name.upper(), str(folder / name)) for word in words]
    ended = train(
        "cpu", tmp_path / "run", "--recipe", str(folder / "mixture.yaml"), *words, "train.steps=30", "--resume", str(alone)
    )
    assert ended.returncode == CheckpointError.exit_code
    assert sentence in ended.output


TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset

from samerun import Loss, Samples


class Points(Dataset):
    def __init__(self, size, shift):
        self.size, self.shift = size, shift

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * (index + self.shift))
        return x + 0.1 * torch.randn(4), x.sum()


class Sum:
    def samples(self, split):
        if split == "test":
            return None
        sizes = (7, 500) if split == "train" else (3, 4)
        few, many = (Samples.of(Points(size, split == "train"), names=("x", "y")) for size in sizes)
        return Samples.mix({"few": few, "many": many}, [3, 1], window=20, phases={7: [1, 1]})

    def model(self, metadata):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model, batch):
        return Loss((model(batch["x"])[:, 0] - batch["y"]).square().mean())


task = Sum
"""


def test_a_task_of_ones_own_mixes_two_data_sets(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASK)
    (tmp_path / "sums.yaml").write_text(
        "task: sums.py\ntrain: {global_batch_size: 8, steps: 10}\nlog: {every_steps: 5, samples: true}\n"
    )
    runs = {"one": ("cpu", 1), "two": ("multi_gpu", 2)}
    for name, (preset, processes) in runs.items():
        words = ("--recipe", str(tmp_path / "sums.yaml"), "--workers", "0")
        train(preset, tmp_path / name, *words, processes=processes).check()
    one, two = (tmp_path / name for name in runs)
    assert read_lines(one / "samples.jsonl") == read_lines(two / "samples.jsonl")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert read(one / "result.json")["validation_samples"] == 7
    rows = [source for line in read_lines(one / "samples.jsonl") for source, _ in line["rows"]]
    assert [rows[first : first + 20].count("few") for first in (0, 20, 48)] == [15, 15, 10]
    expected = {name: rows.count(name) for name in ("few", "many")}
    assert losses(two, "samples_seen_by_source")[-1] == read(two / "result.json")["samples_seen_by_source"] == expected
