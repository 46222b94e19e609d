"""Language models in real processes: the same losses step by step under every preset, and prompts of which nothing counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import read, read_lines, train

from app.errors import DataError
from app.tasks.causal_lm.data.store import embedded_documents
from app.tasks.causal_lm.data.token_writer import writing
from app.tasks.causal_lm.data.tokenizers import Bytes

pytestmark = pytest.mark.multiproc
SLOW = pytest.mark.slow

STEPS, BATCH, LENGTH = 20, 8, 64
RECIPE = (
    "--recipe",
    "lm_tiny",
    f"data.sequence_length={LENGTH}",
    "model.hidden_size=64",
    "model.layers=3",
    f"train.global_batch_size={BATCH}",
    f"train.steps={STEPS}",
    "train.evaluate_every_steps=null",
    "train.evaluate_every_epochs=0",
    "optim.lr=0.002",
    "optim.warmup_steps=5",
    "optim.clip_norm=0.5",
    "log.every_steps=1",
    "log.samples=true",
    "checkpoint.every_minutes=null",
)
ARCHITECTURES = {
    # Grouped heads, answers of 1 to 200 tokens, and documents that do not see each other.
    "llama": ("model.heads=4", "model.key_value_heads=2", "model.tie_embeddings=false", "data.document_masks=true"),
    # The last layer is the first one. The head goes by chunks.
    "gpt2": ("model.architecture=gpt2", "model.heads=4", "model.head=chunked"),
}
TOPOLOGIES = [("cpu", 1, 2), ("multi_gpu", 2, 1), ("deepspeed_zero3", 2, 1), ("fsdp2", 2, 1), ("hsdp", 4, 2)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens of which some count: after each prompt an answer of 1 to 200 bytes."""
    folder, tokenizer, random = tmp_path_factory.mktemp("answers") / "tokens", Bytes(), np.random.default_rng(0)
    text = np.frombuffer(b"".join(embedded_documents()["train"])[:200_000], np.uint8).astype(np.int64)
    with writing(folder, tokenizer.about, {}, token_bytes=tokenizer.token_bytes, answers=True) as writer:
        for split, end in (("train", 100_000), ("validation", 110_000)):
            begin = 0 if split == "train" else 100_000
            while begin < end:
                prompt, answer = (int(size) for size in random.integers(1, 201, 2))
                tokens = text[begin : begin + prompt + answer]
                writer.append(split, tokens, np.array([len(tokens)]), counted=np.arange(len(tokens)) >= prompt)
                begin += len(tokens)
    return folder


def trained(folder: Path, architecture: str, preset: str, processes: int, accumulation: int, answers: Path) -> Path:
    place = folder / f"{architecture}-{preset}-{processes}x{accumulation}"
    bound = f"train.max_micro_batch={BATCH // (processes * accumulation)}"
    words = (*RECIPE, *ARCHITECTURES[architecture], *([f"data.path={answers}"] if architecture == "llama" else []))
    copies = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"} if preset == "hsdp" else {}  # as on two nodes
    train(preset, place, *words, bound, processes=processes, env=copies).check()
    facts = read(place / "run.json")
    assert (facts["world_size"], facts["accumulation"], facts.get("replicas")) == (
        processes,
        accumulation,
        2 if copies else None,
    )
    return place


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, answers: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("references")
    return {name: trained(folder, name, "cpu", 1, 1, answers) for name in ARCHITECTURES}


def cases() -> Iterator[Any]:
    for name, topology in itertools.product(ARCHITECTURES, TOPOLOGIES):
        marks = {("llama", "fsdp2"): (), ("llama", "hsdp"): SLOW, ("gpt2", "fsdp2"): SLOW}.get(
            (name, topology[0]), pytest.mark.long
        )
        yield pytest.param(name, topology, marks=marks, id="-".join(map(str, (name, *topology))))


@pytest.mark.parametrize(("architecture", "topology"), list(cases()))
def test_the_same_losses(
    references: dict[str, Path], answers: Path, tmp_path: Path, architecture: str, topology: tuple[str, int, int]
) -> None:
    one, other = references[architecture], trained(tmp_path, architecture, *topology, answers)
    lines = [read_lines(folder / "metrics.jsonl")[:STEPS] for folder in (one, other)]
    assert [line["step"] for line in lines[1]] == list(range(1, STEPS + 1))
    for name in ("learning_rate", "samples"):
        where = "samples.jsonl" if name == "samples" else "metrics.jsonl"
        assert [line.get(name) for line in read_lines(one / where)] == [line.get(name) for line in read_lines(other / where)]
    apart = {
        name: max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(*lines, strict=True)) for name in ("loss", "grad_norm")
    }
    print(f"{other.name}: largest relative difference {apart}")
    assert apart["loss"] <= 1e-5
    assert apart["grad_norm"] <= 1e-4
    assert max(line["grad_norm"] for line in lines[0]) > 0.5, "nothing was clipped"
    assert lines[0][-1]["loss"] < 0.8 * lines[0][0]["loss"], "nothing was learnt"
    scores = [read(folder / "result.json") for folder in (one, other)]
    for name in ("validation_loss", "validation_bits_per_byte", "validation_perplexity"):
        assert scores[1][name] == pytest.approx(scores[0][name], rel=1e-5)


def test_a_recipe_that_names_its_vocabulary_trains_only_with_a_token_folder(tmp_path: Path) -> None:
    refused = train("cpu", tmp_path / "run", "--recipe", "gpt2_124m", "data.path=nowhere")
    assert refused.returncode == DataError.exit_code
    assert "DataError: the token folder nowhere (data.path) does not exist: write it with `samerun data tok" in refused.output
