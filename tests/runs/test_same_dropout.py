"""A run with dropout, whose samples count differently, is the same run on any topology, and after a resume elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import losses, train

from app.errors import PresetError

pytestmark = pytest.mark.multiproc

TASK = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from app.task import Loss, Samples


@dataclass(frozen=True)
class Net:
    in_attention: float = 0.0
    functional: float = 0.0
    checkpointed: bool = False
    blocks: bool = True


@dataclass(frozen=True)
class Sections:
    net: Net = Net()


class Encoder(nn.Module):
    def __init__(self, net):
        super().__init__()
        options = {"dropout": 0.1, "activation": "gelu", "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(2))
        for layer in self.layers:
            layer.self_attn.dropout = net.in_attention
        self.depth, self.channels, self.last = StochasticDepth(0.2, "row"), nn.Dropout1d(0.1), nn.Linear(16, 1)
        self.net = net

    def forward(self, x):
        for layer in self.layers:
            more = checkpoint(layer, x, use_reentrant=False) if self.net.checkpointed else layer(x)
            x = x + self.depth(more)
        x = F.dropout(x, self.net.functional, self.training)
        return self.last(self.channels(x)).squeeze(-1)


class Sequences:
    def __init__(self, sections):
        self.net = sections.net
        self.blocks = ("TransformerEncoderLayer",) if self.net.blocks else None

    def samples(self, split):
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(96, 5, 16, generator=generator)
        return Samples.of({"x": x, "y": x.sin().sum(-1), "length": torch.arange(96) % 5})

    def model(self, metadata):
        return Encoder(self.net)

    def count(self, batch):
        return batch["length"].sum()

    def loss(self, model, batch):
        valid = torch.arange(5, device=batch["x"].device) < batch["length"][:, None]
        errors = (model(batch["x"]) - batch["y"]).square()
        return Loss.of((errors * valid).sum(), batch["length"].sum())


task = Sequences
"""
STEPS, RESUMED = 20, 8
CASES = {
    "accumulation, computed again": ("cpu", 1, ("train.max_micro_batch=1", "net.checkpointed=true")),
    "ddp": ("multi_gpu", 2, ()),
    "zero2 with accumulation": ("deepspeed_zero2", 2, ("train.max_micro_batch=4",)),
    "zero3, computed again": ("deepspeed_zero3", 2, ("net.checkpointed=true",)),
    "fsdp2 with accumulation": ("fsdp2", 2, ("train.max_micro_batch=6",)),
    "hsdp, two copies of two parts": ("hsdp", 4, ()),
}
COMPILED = {
    "the whole model": ("cpu", 1, "AOT_EAGER", ("net.blocks=false",)),
    "fsdp2, computed again": ("fsdp2", 2, "INDUCTOR", ("train.checkpoint_activations=blocks",)),
}
COMPILED_LONG = {
    f"{preset}{', accumulation, computed again' if keys else ''}": (preset, processes, "INDUCTOR", keys)
    for preset, processes in (("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero2", 2), ("hsdp", 4))
    for keys in ((), ("net.checkpointed=true", "train.max_micro_batch=4"))
}
SIZES = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    (folder / "sequences.py").write_text(TASK)
    optim = "{name: adamw, lr: 0.003, clip_norm: 0.5}"
    sizes = f"{{global_batch_size: 24, steps: {STEPS}}}"
    rest = f"log: {{every_steps: 1}}\ncheckpoint: {{every_steps: {RESUMED}, keep_last: 9}}\n"
    (folder / "sequences.yaml").write_text(f"task: sequences.py\ntrain: {sizes}\noptim: {optim}\n{rest}")
    return folder / "sequences.yaml"


@pytest.fixture(scope="module")
def reference(recipe: Path) -> Path:
    folder = recipe.parent / "reference"
    said = train("cpu", folder, "--recipe", str(recipe)).check().output
    assert "no sample" not in said
    found = losses(folder)
    assert len(found) == STEPS
    assert found[-1] < 0.9 * found[0]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(recipe: Path, reference: Path, tmp_path: Path, case: str) -> None:
    """Gradient norms as well: neither AdamW's steps nor clipped ones show a wrong factor. In some passes no sample counts."""
    preset, processes, keys = CASES[case]
    train(preset, tmp_path, "--recipe", str(recipe), *keys, processes=processes, env=SIZES.get(preset)).check()
    assert losses(tmp_path) == pytest.approx(losses(reference), rel=1e-5)
    norms = losses(tmp_path, "grad_norm"), losses(reference, "grad_norm")
    assert norms[0][:6] == pytest.approx(norms[1][:6], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*COMPILED, *(pytest.param(case, marks=pytest.mark.long) for case in COMPILED_LONG)])
def test_compiled_or_not_it_is_the_same_run(recipe: Path, reference: Path, tmp_path: Path, case: str) -> None:
    """With the same names: an uncompiled run resumes from its checkpoint, and a compiled one from that run's."""
    preset, processes, backend, keys = {**COMPILED, **COMPILED_LONG}[case]
    words = ("--recipe", str(recipe), *keys)
    env = {"ACCELERATE_DYNAMO_BACKEND": backend, **SIZES.get(preset, {})}
    said = train(preset, tmp_path / "0", *words, processes=processes, env=env).check().output
    whole = "net.blocks=false" in keys
    assert f"{backend.lower()} compiles {'the whole model' if whole else 'each of 2 blocks (TransformerEncoderLayer)'}" in said
    assert said.count(" s before the first step; 0 graph breaks") == 1
    assert "recompile_limit" not in said
    tolerance = 1e-4 if backend == "INDUCTOR" else 1e-5
    assert losses(tmp_path / "0") == pytest.approx(losses(reference), rel=tolerance)
    uncompiled: tuple[str, int, dict[str, str]] = ("cpu", 1, {})
    for step, (kind, count, variables) in ((RESUMED, uncompiled), (2 * RESUMED, (preset, processes, env))):
        folder = tmp_path / str(step)
        source = tmp_path / str(step - RESUMED) / "checkpoints" / f"step-{step:08d}"
        train(kind, folder, *words, "--resume", str(source), processes=count, env=variables).check()
        assert losses(folder) == pytest.approx(losses(reference)[step:], rel=tolerance)


@pytest.mark.parametrize(
    ("preset", "processes", "words", "sentence"),
    [
        ("deepspeed_zero3", 2, "train.steps=2", "sets dynamo_backend and ZeRO-3, under which blocks cannot be compiled"),
        ("cpu", 1, "net.blocks=false", "sets dynamo_use_regional_compilation, but the model, a Encoder, has no blocks"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    recipe: Path, tmp_path: Path, preset: str, processes: int, words: str, sentence: str
) -> None:
    env = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
    finished = train(preset, tmp_path / "run", "--recipe", str(recipe), words, processes=processes, env=env)
    assert finished.returncode == PresetError.exit_code
    assert sentence in finished.output
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_elsewhere_with_the_masks_it_would_have_had(recipe: Path, reference: Path, tmp_path: Path) -> None:
    resume = ("--resume", str(reference / "checkpoints" / f"step-{RESUMED:08d}"))
    train("multi_gpu", tmp_path, "--recipe", str(recipe), *resume, processes=2).check()
    assert losses(tmp_path) == pytest.approx(losses(reference)[RESUMED:], rel=1e-5)


def test_draws_that_belong_to_no_sample_are_noted_on_one_process_and_refused_elsewhere(recipe: Path, tmp_path: Path) -> None:
    """Dropout inside attention, and in functions, which the first pass shows."""
    words = ("--recipe", str(recipe), "train.steps=2", "net.in_attention=0.1")
    note = "note: forward passes use random numbers that do not belong to samples (layers.0.self_attn: it draws"
    assert note in train("cpu", tmp_path / "one", *words).check().output
    many = train("cpu", tmp_path / "many", *words, "train.max_micro_batch=12")
    assert "RecipeError: forward passes use random numbers that do not belong to samples (layers.0.self_attn" in many.output
    assert "Set the dropout of attention to 0" in many.output
    assert not (tmp_path / "many").exists()
    hidden = train("multi_gpu", tmp_path / "hidden", *words[:-1], "net.functional=0.1", processes=2)
    assert "samples (`x = F.dropout(x, self.net.functional, self.training)` in line " in hidden.output
