"""Adapters beside frozen layers: the same run under every preset; what it leaves, merged or for peft, is what it trained."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from processes import losses, train
from transformers import AutoModelForCausalLM

from app.checkpoints import step_folders, stored_weights
from app.export import main as export

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21 asks for it
]

RECIPE = (
    "--recipe", "lm_tiny", "data.sequence_length=64", "model.hidden_size=64", "model.layers=2", "model.heads=4",
    "train.global_batch_size=8", "train.evaluate_every_steps=null", "train.evaluate_every_epochs=0", "log.every_steps=1",
    "checkpoint.every_minutes=null", "log.examples=0", "optim.lr=0.01", "optim.warmup_steps=2",
)  # fmt: skip
KINDS = {
    "llama": ("model.lora_targets=[q_proj,v_proj]", "model.lora_alpha=16"),
    "gpt2": ("model.architecture=gpt2",),  # whose layers hold their weights transposed, and whose last layer is the first one
}
OTHERS = {"llama": ("multi_gpu", "deepspeed_zero3", "fsdp2"), "gpt2": ("deepspeed_zero3",)}
STEPS, SAVED = 10, 5


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(64)[None] + 40).logits
    return found


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapters_are_the_same_under_every_preset_and_what_peft_and_transformers_load(tmp_path: Path, kind: str) -> None:
    begun = tmp_path / "base"
    architecture = KINDS[kind][:1] if kind == "gpt2" else ()
    train("cpu", begun, *RECIPE, *architecture, "train.steps=3").check()
    words = (*RECIPE, *KINDS[kind], f"train.steps={STEPS}", "model.lora_rank=4", f"train.init_from={begun}")
    words = (*words, f"checkpoint.every_steps={SAVED}")
    train("cpu", tmp_path / "cpu", *words).check()
    alone = losses(tmp_path / "cpu")
    for preset in OTHERS[kind]:
        train(preset, tmp_path / preset, *words, processes=2).check()
        assert losses(tmp_path / preset) == pytest.approx(alone, rel=1e-5), preset
        (frozen,) = (tmp_path / preset / "frozen").iterdir()
        assert frozen.name == next((tmp_path / "cpu" / "frozen").iterdir()).name

    step = tmp_path / "deepspeed_zero3" / "checkpoints" / f"step-{SAVED:08}"
    train("fsdp2", tmp_path / "on", *words, "--resume", str(step), processes=2).check()
    assert losses(tmp_path / "on") == pytest.approx(alone[SAVED:], rel=1e-5)

    left = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "on"))
    newest = step_folders.committed(tmp_path / "on")[0]
    assert torch.allclose(logits(stored_weights.load(newest)[1]), left, atol=1e-5), (
        "a checkpoint has the adapters beside its base"
    )
    assert export([str(tmp_path / "on"), "--out", str(tmp_path / "plain")]) == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), left)
    assert export([str(tmp_path / "on"), "--adapter", "--out", str(tmp_path / "adapter")]) == 0
    base = AutoModelForCausalLM.from_pretrained(begun)
    before = logits(base)
    assert (before - left).abs().max() > 0.1
    tuned = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert torch.allclose(tuned, left, atol=1e-5)
