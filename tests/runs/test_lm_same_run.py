"""The same run of a language model on every topology: prompts, packed, with answers of 1 to 200 tokens, and clipped AdamW.

test_lm_runs.py compares fewer topologies, sooner. Here are all of them, over 20 steps; over 100, in float64, when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from languages import write_answers
from processes import read, read_lines, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

BATCH = 8
RECIPE = f"""
task: causal_lm
data: {{document_masks: true}}
model: {{architecture: llama, hidden_size: 64, layers: 3, heads: 4, key_value_heads: 2, intermediate_size: 128}}
train: {{global_batch_size: {BATCH}, evaluate_every_epochs: 0}}
optim: {{name: adamw, lr: 0.001, betas: [0.9, 0.95], weight_decay: 0.1, clip_norm: 0.5, warmup_steps: 5}}
log: {{every_steps: 1, samples: true}}
"""
SHARDED = [("deepspeed_zero1", 2, 1), ("deepspeed_zero2", 2, 1), ("deepspeed_zero3", 2, 1), ("fsdp2", 2, 1)]
TOPOLOGIES = [("cpu", 1, 2), ("multi_gpu", 2, 1), ("multi_gpu", 2, 2), ("multi_gpu", 4, 1), *SHARDED, ("fsdp2", 2, 2)]
DOUBLE = [("cpu", 1, 2), ("multi_gpu", 2, 2), ("multi_gpu", 4, 1), ("fsdp2", 2, 1)]  # DeepSpeed's weights are in float32

Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs, each started when first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    answers = write_answers(folder / "answers", sequence_length=256)
    (folder / "answers.yaml").write_text(RECIPE)
    done: dict[tuple[str | int, ...], Path] = {}

    def run(preset: str, processes: int, accumulation: int, *words: str) -> Path:
        case = (preset, processes, accumulation, *words)
        if case not in done:
            done[case] = folder / f"run-{len(done)}"
            given = (f"data.path={answers}", f"train.max_micro_batch={BATCH // (processes * accumulation)}", *words)
            train(preset, done[case], "--recipe", str(folder / "answers.yaml"), *given, processes=processes).check()
            facts = read(done[case] / "run.json")
            assert (facts["world_size"], facts["accumulation"]) == (processes, accumulation)
        return done[case]

    return run


def assert_same(one: Path, other: Path, *, steps: int, tolerance: float) -> None:
    samples = [[line["samples"] for line in read_lines(folder / "samples.jsonl")] for folder in (one, other)]
    assert len(samples[0]) == steps
    assert samples[0] == samples[1]
    lines, others = (read_lines(folder / "metrics.jsonl") for folder in (one, other))
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in others]
    differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(lines, others, strict=True)]
    print(f"largest relative difference {max(differences[:20]):.1e}, {max(differences):.1e}")
    assert max(differences[:20]) <= min(tolerance, 1e-5)
    assert max(differences) <= tolerance
    results = [read(folder / "result.json")["validation_loss"] for folder in (one, other)]
    assert results[1] == pytest.approx(results[0], rel=tolerance)


IN_SLOW = {("multi_gpu", 2, 2), ("deepspeed_zero2", 2, 1), ("deepspeed_zero3", 2, 1), ("fsdp2", 2, 2)}


@pytest.mark.parametrize(
    ("preset", "processes", "accumulation"),
    [pytest.param(*topology, marks=() if topology in IN_SLOW else pytest.mark.long) for topology in TOPOLOGIES],
)
def test_twenty_steps(trained: Trained, preset: str, processes: int, accumulation: int) -> None:
    one = trained("cpu", 1, 1, "train.steps=20")
    assert_same(one, trained(preset, processes, accumulation, "train.steps=20"), steps=20, tolerance=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("preset", "processes", "accumulation"), TOPOLOGIES)
def test_a_hundred_steps(trained: Trained, preset: str, processes: int, accumulation: int) -> None:
    one = trained("cpu", 1, 1, "train.steps=100")
    assert_same(one, trained(preset, processes, accumulation, "train.steps=100"), steps=100, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("preset", "processes", "accumulation"), DOUBLE)
def test_a_hundred_steps_in_float64(trained: Trained, preset: str, processes: int, accumulation: int) -> None:
    """Of GPT-2: the norms of transformers' Llama compute in float32 whatever comes, and what they round grows to 2e-8."""
    words = ("train.steps=100", "train.dtype=float64", "model.architecture=gpt2", "model.key_value_heads=null")
    one = trained("cpu", 1, 1, *words)
    assert_same(one, trained(preset, processes, accumulation, *words), steps=100, tolerance=1e-9)
