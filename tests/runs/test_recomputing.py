"""Blocks that are computed again for the backward pass: the same gradients, with less memory, under every preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import read_lines, train
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from app.distributed.model_preparation import checkpoint_activations
from app.distributed.sample_dropout import give_to_samples
from app.errors import RecipeError

STEPS, RESUMED = 8, 4


class Layer(nn.Module):
    """Draws by samples and by torch's generator, and has statistics of what it saw."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        inner = F.dropout(self.wide(self.norm(x)).tanh(), 0.1, self.training)
        return x + scale * self.dropout(self.narrow(inner).tanh())


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Layer(width) for _ in range(6)), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.last(x)  # type: ignore[no-any-return]


def trained(*, again: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Gradients and buffers after two passes, and the most bytes of tensors in them."""
    torch.manual_seed(0)
    model, x = Net(64), torch.randn(512, 64)
    draws = give_to_samples(model, 1)
    names = list(model.state_dict())
    if again:
        checkpoint_activations(model, {"Layer"})
    assert list(model.state_dict()) == names
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        for first in (0, 512):
            tracker.reset_mod_stats()
            draws.begin(torch.arange(first, first + 512))
            model(x).square().mean().backward()
    draws.end()
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    gradients = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
    return gradients, dict(model.named_buffers()), peak


def test_gradients_and_statistics_are_the_same_bits_in_less_memory() -> None:
    kept, again = trained(again=False), trained(again=True)
    for one, other in zip(kept[:2], again[:2], strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)
    assert again[2] < 0.4 * kept[2]


@pytest.mark.parametrize(("classes", "why"), [(set(), "it names no blocks"), ({"Block"}, "said to be Block, and it has none")])
def test_a_model_without_blocks_is_refused(classes: Any, why: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"checkpoint_activations is blocks, but for the model, a Net, .*{why}.*: set it to none"
    ):
        checkpoint_activations(Net(4), classes)


def recipe() -> tuple[str, ...]:
    sizes = ("model.architecture=gpt2", "model.hidden_size=32", "model.layers=3", "model.heads=2", "data.sequence_length=32")
    steps = ("train.global_batch_size=8", f"train.steps={STEPS}", "train.max_validation_samples=8", "log.every_steps=1")
    more = ("optim.lr=0.0003", "optim.warmup_steps=2", "model.dropout=0.1", f"checkpoint.every_steps={RESUMED}")
    return ("--recipe", "lm_tiny", *sizes, *steps, *more)


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    train("cpu", folder, *recipe()).check()
    return folder


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "processes", "first"),
    [
        ("cpu", 1, 0),
        ("fsdp2", 2, 0),
        pytest.param("deepspeed_zero3", 2, RESUMED, marks=SLOW),
        pytest.param("multi_gpu", 2, 0, marks=SLOW),
        pytest.param("deepspeed_zero2", 2, 0, marks=SLOW),
        pytest.param("hsdp", 4, 0, marks=SLOW),
    ],
)
def test_runs_are_the_same_under_every_preset_and_resume(
    kept: Path, tmp_path: Path, preset: str, processes: int, first: int
) -> None:
    resume = ("--resume", str(kept / "checkpoints" / f"step-{RESUMED:08d}")) if first else ()
    words = (*recipe(), "train.checkpoint_activations=blocks", f"train.max_micro_batch={4 // min(processes, 2)}", *resume)
    copies = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"} if preset == "hsdp" else {}
    train(preset, tmp_path, *words, processes=processes, env=copies).check()
    for key in ("loss", "grad_norm"):
        expected = [line[key] for line in read_lines(kept / "metrics.jsonl")][first:]
        assert len(expected) == STEPS - first
        assert [line[key] for line in read_lines(tmp_path / "metrics.jsonl")] == pytest.approx(expected, rel=1e-6)
