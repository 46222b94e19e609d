"""Base weights in the forms in which people have them: those of the same model are taken, all others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from languages import save_network
from processes import run, train
from safetensors.torch import load_file, save_file

from app.errors import CheckpointError, RunFolderError
from app.tasks.causal_lm import generate
from app.tasks.causal_lm.data.tokenizers import Bytes

Weights = dict[str, torch.Tensor]
SHORT = ("--recipe", "lm_tiny", "optim.lr=0", "train.steps=1", "data.sequence_length=32", "train.global_batch_size=2",
         "train.evaluate_every_epochs=0", "train.evaluate_every_steps=null", "train.max_validation_samples=2",
         "model.layers=null", "model.hidden_size=null", "model.heads=null",
         "model.architecture=null", "model.tie_embeddings=null")  # fmt: skip


def saved(folder: Path, kind: str) -> Weights:
    """The weights of a small network that transformers writes there, with a tokenizer of bytes."""
    save_network(folder, kind.removeprefix("tied "), tie_word_embeddings=kind != "llama", eos_token_id=Bytes.eos_id)
    for name, content in Bytes().files().items():
        (folder / name).write_bytes(content)
    return load_file(folder / "model.safetensors")


def written(folder: Path, weights: Weights) -> None:
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def as_on_the_hub(weights: Weights) -> Weights:
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()} | masks


def of_a_base_model(weights: Weights) -> Weights:
    """Tied, so that there is no head; and some in float8."""
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    return {name: it.to(torch.float8_e4m3fn) if "proj" in name else it for name, it in named.items()}


def of_lightning(weights: Weights) -> Weights:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    return {f"_orig_mod.module.model.{name}": tensor for name, tensor in (weights | old).items()}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("gpt2", as_on_the_hub, ": 28 tensors taken\n"),
        ("tied llama", of_a_base_model, ": 20 tensors taken; 14 of them converted from float8"),
        ("llama", of_lightning, ": 21 tensors taken\n"),
    ],
)
def test_they_are_taken(tmp_path: Path, kind: str, changed: Callable[[Weights], Weights], said: str) -> None:
    """And are what the run leaves at a learning rate of 0."""
    plain = saved(tmp_path / "net", kind)
    written(tmp_path / "net", changed(plain))
    words = (f"model.path={tmp_path / 'net'}", f"train.init_from={tmp_path / 'net'}")
    assert said in train("cpu", tmp_path / "run", *SHORT, *words).check().output
    left = load_file(tmp_path / "run" / "model.safetensors")
    assert left.keys() == plain.keys()
    rounded = "proj" if changed is of_a_base_model else "nothing"
    for name, tensor in plain.items():
        assert torch.equal(left[name], tensor.to(torch.float8_e4m3fn).float() if rounded in name else tensor), name


WRONG: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "missing": (lambda them: {name: it for name, it in them.items() if name != "model.norm.weight"},
                "model.norm.weight is not in the file."),
    "contradictory": (lambda them: {**them, "lm_head.weight": them["model.embed_tokens.weight"] + 1},
                      "lm_head.weight is tied to another tensor, of which the file has other values."),
}  # fmt: skip


@pytest.mark.multiproc
def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    """By `generate`; the last also by a run that begins with them and by `evaluate`."""
    folder = tmp_path / "net"
    plain = saved(folder, "tied llama")
    for case, (changed, sentence) in WRONG.items():
        written(folder, changed(plain))
        with pytest.raises(RunFolderError) as caught:
            generate.main([str(folder), "a", "--max-tokens", "1", "--device", "cpu"])
        assert f"the weights of {folder} belong to another model than its config.json: " in str(caught.value)
        assert sentence in str(caught.value), case
    words = (f"model.path={folder}", f"train.init_from={folder}")
    begun = train("cpu", tmp_path / "run", *SHORT, *words)
    scored = run("cpu", 1, "app.evaluate", str(folder), "data.sequence_length=32")
    for done, error in ((begun, CheckpointError), (scored, RunFolderError)):
        assert done.returncode == error.exit_code
        assert WRONG["contradictory"][1] in done.output
    written(folder, {**plain, "lm_head.weight": plain["model.embed_tokens.weight"]})  # twice the same, as in torch's files
    assert "21 tensors taken\n" in train("cpu", tmp_path / "run", *SHORT, *words).check().output
