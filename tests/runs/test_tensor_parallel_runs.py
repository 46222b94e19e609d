"""Tensor parallelism: the same run as one process, of prompts with uneven answers, clipped, over 20 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from languages import write_answers
from processes import read, read_lines, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

BATCH, STEPS = 8, 20
RECIPE = f"""
task: causal_lm
data: {{document_masks: true}}
model: {{architecture: llama, hidden_size: 64, layers: 2, heads: 4, intermediate_size: 128}}
train: {{global_batch_size: {BATCH}, steps: {STEPS}, evaluate_every_epochs: 0, ema_decay: 0.9}}
optim: {{name: adamw, lr: 0.001, betas: [0.9, 0.95], weight_decay: 0.1, clip_norm: 0.5, warmup_steps: 5}}
log: {{every_steps: 1, samples: true}}
"""
EVEN = ("model.vocab_size=258",)  # of bytes there are 257, and so the head stays whole
LLAMA = ("model.key_value_heads=2", "model.head=chunked", *EVEN)
QWEN3 = ("model.architecture=qwen3", "model.key_value_heads=2", "model.tie_embeddings=true", "train.dtype=float64", *EVEN)
PHI = ("model.architecture=phi", "model.dropout=0.1")
AGAIN = ("train.checkpoint_activations=blocks",)
CASES = [
    pytest.param(LLAMA, 2, 1, (), 1e-5, id="llama"),
    pytest.param(LLAMA, 4, 1, AGAIN, 1e-5, id="llama, FSDP2 of 2"),
    pytest.param(QWEN3, 2, 2, (), 1e-9, id="qwen3, tied, float64, accumulation 2"),
    pytest.param(PHI, 2, 1, AGAIN, 1e-5, id="phi, dropout"),
]

Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs, each started when first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    answers = write_answers(folder / "answers", sequence_length=64, longest=40)
    (folder / "recipe.yaml").write_text(RECIPE)
    done: dict[tuple[object, ...], Path] = {}

    def run(preset: str, processes: int, accumulation: int, *words: str) -> Path:
        case = (preset, processes, accumulation, *words)
        if case not in done:
            done[case] = folder / f"run-{len(done)}"
            data_ranks = max(1, processes // 2)
            given = (f"data.path={answers}", f"train.max_micro_batch={BATCH // (data_ranks * accumulation)}", *words)
            sizes = {"PARALLELISM_CONFIG_TP_SIZE": "2"} if preset == "tensor_parallel" else {}
            train(preset, done[case], "--recipe", str(folder / "recipe.yaml"), *given, processes=processes, env=sizes).check()
            facts = read(done[case] / "run.json")
            assert (facts["world_size"], facts["accumulation"]) == (processes, accumulation)
        return done[case]

    return run


@pytest.mark.parametrize(("words", "processes", "accumulation", "more", "tolerance"), CASES)
def test_the_same_run(
    trained: Trained, words: tuple[str, ...], processes: int, accumulation: int, more: tuple[str, ...], tolerance: float
) -> None:
    one, other = trained("cpu", 1, 1, *words), trained("tensor_parallel", processes, accumulation, *words, *more)
    samples = [[line["samples"] for line in read_lines(folder / "samples.jsonl")] for folder in (one, other)]
    assert len(samples[0]) == STEPS
    assert samples[0] == samples[1]
    lines, others = (read_lines(folder / "metrics.jsonl") for folder in (one, other))
    for key in ("loss", "grad_norm"):
        largest = max(abs(a[key] / b[key] - 1) for a, b in zip(lines, others, strict=True))
        print(f"largest relative difference of {key}: {largest:.1e}")
        assert largest <= tolerance
    assert [line["tokens_seen"] for line in lines] == [line["tokens_seen"] for line in others]
    results = [read(folder / "result.json")["validation_loss"] for folder in (one, other)]
    assert results[1] == pytest.approx(results[0], rel=tolerance)
    texts = [[line["text"] for line in read_lines(folder / "texts.jsonl")] for folder in (one, other)]
    assert texts[0] == texts[1]


OWN = """
import torch
from torch import nn

from app.task import Loss, Samples


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).squeeze(-1)


class Sines:
    blocks = ("Block",)

    def samples(self, split):
        x = torch.randn(96, 16, generator=torch.Generator().manual_seed(len(split)))
        return None if split == "test" else Samples.of({"x": x, "y": x.sin().sum(-1)})

    def model(self, metadata):
        return Net()

    def init_module(self, model, name, module):
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def loss(self, model, batch):
        return Loss.of((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))


task = Sines
"""


def test_the_same_run_by_a_plan_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "sines.py").write_text(OWN)
    rest = "optim: {name: adamw, lr: 0.003, clip_norm: 0.5}\nlog: {every_steps: 1}\n"
    (tmp_path / "sines.yaml").write_text(f"task: sines.py\ntrain: {{global_batch_size: 16, steps: {STEPS}}}\n{rest}")
    words = ("--recipe", str(tmp_path / "sines.yaml"))
    train("cpu", tmp_path / "one", *words).check()
    train("tensor_parallel", tmp_path / "4", *words, processes=4, env={"PARALLELISM_CONFIG_TP_SIZE": "2"}).check()
    for key in ("loss", "grad_norm"):
        expected = [line[key] for line in read_lines(tmp_path / "one" / "metrics.jsonl")]
        assert len(expected) == STEPS
        assert [line[key] for line in read_lines(tmp_path / "4" / "metrics.jsonl")] == pytest.approx(expected, rel=1e-5)
    scores = [read(tmp_path / name / "result.json")["validation_loss"] for name in ("one", "4")]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
