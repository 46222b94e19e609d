"""The same run of a language model on every topology: prompts, packed, with answers of 1 to 200 tokens, and clipped AdamW.

Tensor and context parallelism divide among 2 processes, and FSDP2 among the rest. A constant run may become a WSD run on a
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from languages import write_answers
from processes import Started, last_of_each, losses, read, read_lines, train

from app.checkpoints import step_folders
from app.checks.verify import verify
from app.errors import CheckpointError

pytestmark = pytest.mark.multiproc
SLOW, LONG = pytest.mark.slow, pytest.mark.long

BATCH = 8
RECIPE = f"""
task: causal_lm
data: {{document_masks: true}}
model: {{architecture: llama, hidden_size: 64, layers: 3, heads: 4, key_value_heads: 2, intermediate_size: 128}}
train: {{global_batch_size: {BATCH}, evaluate_every_epochs: 0}}
optim: {{name: adamw, lr: 0.001, betas: [0.9, 0.95], weight_decay: 0.1, clip_norm: 0.5, warmup_steps: 5}}
log: {{every_steps: 1, samples: true}}
"""
FIELDS = ("loss", "grad_norm", "learning_rate", "tokens_seen")
EXPERTS = (
    "model.architecture=qwen3_moe", "model.balance_loss=0.1",
    "model.settings={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 48}",
)  # fmt: skip
GPT2 = ("model.architecture=gpt2", "model.key_value_heads=null")
MARKS = {
    ("fsdp2", 2, 1): (), ("multi_gpu", 2, 2): SLOW, ("deepspeed_zero2", 2, 1): LONG, ("deepspeed_zero3", 2, 1): SLOW,
    ("fsdp2", 2, 2): LONG, ("hsdp", 4, 2): SLOW, ("cpu", 1, 2): LONG, ("multi_gpu", 2, 1): LONG, ("multi_gpu", 4, 1): LONG,
    ("deepspeed_zero1", 2, 1): LONG,
}  # fmt: skip
TENSOR = {
    "llama": (2, 1, 1e-5, ("model.key_value_heads=2", "model.head=chunked", "model.vocab_size=258")),
    "llama, FSDP2 of 2": (4, 1, 1e-5, ("model.vocab_size=258", "train.checkpoint_activations=blocks")),
    "qwen3, tied, float64": (
        2, 2, 1e-9, ("model.architecture=qwen3", "model.tie_embeddings=true", "train.dtype=float64", "model.vocab_size=258"),
    ),
    # Of bytes there are 257: the head stays whole.
    "phi, dropout": (2, 1, 1e-5, ("model.architecture=phi", "model.dropout=0.1", "model.key_value_heads=null")),
}  # fmt: skip
CONTEXT = {
    "llama": (2, 2, (), ()),
    "llama, FSDP2 of 2": (4, 1, ("train.checkpoint_activations=blocks", "model.head=chunked"), SLOW),
    "llama, FSDP2 of 2, accumulation": (4, 2, (), LONG),
    "gpt2, dropout": (2, 2, (*GPT2, "model.dropout=0.1"), LONG),
    "mistral, window, eager": (
        2, 1, ("model.architecture=mistral", "model.attention=eager", "model.settings={sliding_window: 50}"), LONG,
    ),
    "lora": (2, 1, ("model.lora_rank=16", "optim.lr=0.003"), LONG),
}  # fmt: skip
OF_4 = "context_parallel of 4"
SIZES = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "tensor_parallel": {"PARALLELISM_CONFIG_TP_SIZE": "2"},
         "context_parallel": {"PARALLELISM_CONFIG_CP_SIZE": "2"}, OF_4: {"PARALLELISM_CONFIG_CP_SIZE": "4"}}  # fmt: skip
LAYERED = ("optim.layer_decay=0.5", 'optim.groups={"*.mlp.*": {lr_factor: 2}}', "optim.lr=0.01")
WSD, CONSTANT = ("optim.schedule=wsd", "optim.decay_steps=8"), ("optim.schedule=constant", "checkpoint.every_steps=12")
RESUMES = [(("deepspeed_zero2", 2, 1), ("multi_gpu", 2)), (("multi_gpu", 2, 2), ("fsdp2", 2)), (("hsdp", 4, 2), ("cpu", 1)),
           (("fsdp2", 2, 1), ("deepspeed_zero3", 2)), (("cpu", 1, 1), ("hsdp", 4))]  # fmt: skip
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
            preset, sizes = preset.removesuffix(" of 4"), SIZES.get(preset, {})
            size = int(next(iter(sizes.values()), 1))
            data_ranks = processes if preset == "hsdp" else processes // size
            given = (f"data.path={answers}", f"train.max_micro_batch={BATCH // (data_ranks * accumulation)}", *words)
            recipe = ("--recipe", str(folder / "answers.yaml"))
            train(preset, done[case], *recipe, *given, processes=processes, env=sizes).check()
            facts = read(done[case] / "run.json")
            assert (facts["world_size"], facts["accumulation"]) == (processes, accumulation)
            names = {"hsdp": "replicas"}
            found = {name: facts[name] for name in ("replicas", "tensor_parallel", "context_parallel") if name in facts}
            assert found == ({names.get(preset, preset): size} if sizes else {})
        return done[case]

    return run


def cases() -> Iterator[Any]:
    """Every topology over 20 steps, GPT-2 with a tied and chunked head, and over 100 steps; in float64 too."""
    for topology, marks in MARKS.items():
        yield pytest.param(topology, (), 20, 1e-5, marks=marks)
        if topology[0] != "hsdp":
            yield pytest.param(topology, (), 100, 1e-4, marks=LONG)
    yield pytest.param(("fsdp2", 2, 1), (*GPT2, "model.head=chunked"), 20, 1e-5, marks=SLOW)
    for topology in (("fsdp2", 2, 1), ("cpu", 1, 2), ("multi_gpu", 2, 2), ("deepspeed_zero3", 2, 1)):
        marks = () if topology[0] == "fsdp2" else SLOW if topology[0] == "deepspeed_zero3" else LONG
        yield pytest.param(topology, EXPERTS, 20, 1e-5, marks=marks, id=f"experts, {topology}")
    for topology in (*MARKS, ("tensor_parallel", 2, 1)):
        marks = () if topology in (("cpu", 1, 2), ("fsdp2", 2, 1)) else LONG
        yield pytest.param(topology, (*LAYERED, *WSD), 20, 1e-5, marks=marks, id=f"layered, {topology}")
    for name, (processes, accumulation, tolerance, words) in TENSOR.items():
        topology = ("tensor_parallel", processes, accumulation)
        yield pytest.param(
            topology, words, 20, tolerance, marks=SLOW if "FSDP2" in name else LONG, id=f"tensor_parallel: {name}"
        )
    for name, (processes, accumulation, words, marks) in CONTEXT.items():
        topology = ("context_parallel", processes, accumulation)
        yield pytest.param(topology, words, 20, 1e-5, marks=marks, id=f"context_parallel: {name}")
    for accumulation in (1, 2):
        yield pytest.param((OF_4, 4, accumulation), (), 20, 1e-5, marks=LONG, id=f"{OF_4}, accumulation {accumulation}")
    for topology in DOUBLE:  # the norms of transformers' Llama compute in float32 in any case, and differ by 2e-8
        yield pytest.param(topology, (*GPT2, "train.dtype=float64"), 100, 1e-9, marks=LONG)


@pytest.mark.parametrize(("topology", "words", "steps", "tolerance"), list(cases()))
def test_a_run_is_the_same(
    trained: Trained, topology: tuple[str, int, int], words: tuple[str, ...], steps: int, tolerance: float
) -> None:
    one, other = (trained(*it, f"train.steps={steps}", *words) for it in (("cpu", 1, 1), topology))
    samples = [[line["samples"] for line in read_lines(folder / "samples.jsonl")] for folder in (one, other)]
    assert len(samples[0]) == steps
    assert samples[0] == samples[1]
    found, expected = ({name: losses(folder, name) for name in FIELDS} for folder in (other, one))
    for name in ("learning_rate", "tokens_seen"):
        assert found[name] == expected[name]
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["loss"][:20] == pytest.approx(expected["loss"][:20], rel=min(tolerance, 1e-5))
    assert found["grad_norm"][:20] == pytest.approx(expected["grad_norm"][:20], rel=1e-4)
    assert max(found["grad_norm"]) > 0.5, "nothing was clipped"
    assert found["loss"][-1] < 0.95 * found["loss"][0], "nothing was learned"
    results = [read(folder / "result.json")["validation_loss"] for folder in (one, other)]
    assert results[1] == pytest.approx(results[0], rel=tolerance)
    texts = [[line["text"] for line in read_lines(folder / "texts.jsonl")] for folder in (one, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("source", "target"), [RESUMES[0], *(pytest.param(*it, marks=LONG) for it in RESUMES[1:])], ids=str)
def test_a_constant_run_begins_its_decay_on_a_resume(
    trained: Trained, tmp_path: Path, source: tuple[str, int, int], target: tuple[str, int]
) -> None:
    """It is then the WSD run that was never anything else: the decay begins with step 13, whose rate is still the peak."""
    whole = trained("cpu", 1, 1, "train.steps=20", *LAYERED, *WSD)
    constant = trained(*source, "train.steps=14", *LAYERED, *CONSTANT)
    recipe = ("--recipe", str(whole.parent / "answers.yaml"), f"data.path={whole.parent / 'answers'}", *LAYERED, *WSD)
    found = tmp_path / "found"
    chosen = (*recipe, "train.steps=20", "--resume", str(step_folders.path_of(constant, 12)))
    output = train(target[0], found, *chosen, processes=target[1], env=SIZES.get(target[0])).check().output
    assert "the run is 20 steps long instead of 14, optim.decay_steps was None and is 8, optim.schedule was" in output
    assert "which changes learning rates from step 14 on" in output
    assert losses(constant, "learning_rate")[:13] == losses(whole, "learning_rate")[:13]
    assert read_lines(found / "samples.jsonl") == read_lines(whole / "samples.jsonl")[12:]
    assert losses(found, "learning_rate") == losses(whole, "learning_rate")[12:]
    assert losses(found) == pytest.approx(losses(whole)[12:], rel=1e-5)
    assert verify(found)[0].is_good
    late = train("cpu", tmp_path / "late", *recipe, "train.steps=20", "--resume", str(constant))  # step 14 was taken
    assert late.returncode == CheckpointError.exit_code
    assert "changes the learning rate of step 14, a step taken already" in late.output


@LONG
def test_steps_before_and_after_a_change_of_the_schedule_are_replayed(tmp_path: Path) -> None:
    """A constant run of 6 steps, then of 14, then with a decay up to step 20, in one folder."""
    words = ("--recipe", "lm_tiny", "data.sequence_length=64", "checkpoint.every_steps=4", "checkpoint.keep_last=9")
    for changed in (("train.steps=6",), ("train.steps=14",), ("train.steps=20", "optim.schedule=wsd", "optim.decay_steps=6")):
        chosen = last_of_each((*words, "optim.schedule=constant", "log.every_steps=1", *changed))
        train("cpu", tmp_path / "run", *chosen, "--resume", "auto").check()
    for command in (["verify", "--replay", "6"], ["replay", "--step", "5:19"]):
        Started(["samerun", *command, str(tmp_path / "run")]).wait().check()
