"""A network that sees later tokens, or that cannot be trained, is refused by every command before data is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import train
from refusals import Refused
from test_generate import save_llama
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import RecipeError

CODE = RecipeError.exit_code
ENCODERS = ("bert", "roberta", "electra", "camembert", "xlm-roberta", "ernie", "data2vec-text")
WITHOUT_SDPA = ("rembert", "big_bird", "megatron-bert")
TINY = ("--recipe", "lm_tiny", "model.architecture={}", "model.attention={}", "data.path=no/such/folder")


def tiny(architecture: str, attention: str = "sdpa") -> list[str]:
    return [word.format(architecture if "architecture" in word else attention) for word in TINY]


@pytest.mark.parametrize(
    ("architecture", "attention"), [*((name, "sdpa") for name in ENCODERS), *((name, "eager") for name in WITHOUT_SDPA)]
)
def test_an_encoder_does_not_train(refused: Refused, architecture: str, attention: str) -> None:
    says = (
        f"model.architecture={architecture} sees later tokens: its logits at position 0 change with the tokens from position 1"
    )
    refused(["app.train", *tiny(architecture, attention)], says, CODE)


@pytest.mark.parametrize(
    ("architecture", "attention", "says"),
    [
        *((name, "sdpa", f"model.architecture={name} is a mixture of experts") for name in ("mixtral", "qwen3_moe", "olmoe")),
        ("gpt_oss", "eager", "model.architecture=gpt_oss is a mixture of experts, which cannot be trained"),
        ("gemma2", "sdpa", "transformers has no gemma2 with model.attention=sdpa: set model.attention=eager"),
    ],
)
def test_what_cannot_be_trained_is_said_before_data_is_opened(
    refused: Refused, architecture: str, attention: str, says: str
) -> None:
    refused(["app.train", *tiny(architecture, attention)], says, CODE)


def test_plan_refuses_what_training_refuses(refused: Refused) -> None:
    plan = ["samerun", "plan", "--recipe", "lm_tiny", "--devices", "2", "--device", "h100"]
    refused([*plan, "model.architecture=mixtral"], "mixtral is a mixture of experts", CODE)
    refused([*plan, "model.architecture=bert"], "model.architecture=bert sees later tokens", CODE)


@pytest.mark.parametrize(
    "keys",
    [
        ("model.architecture=bert", "model.settings={is_decoder: true}"),
        ("model.architecture=gemma2", "model.attention=eager"),
        ("model.architecture=mistral", "data.document_masks=true"),
    ],
)
def test_causal_networks_train(tmp_path: Path, keys: tuple[str, ...]) -> None:
    small = ("train.steps=1", "data.sequence_length=32", "model.layers=2", "model.hidden_size=32", "model.heads=4")
    none = ("train.evaluate_every_epochs=0", "train.evaluate_every_steps=null", "model.tie_embeddings=null")
    train("cpu", tmp_path / "run", "--recipe", "lm_tiny", *small, *none, *keys).check()


def other(folder: Path, architecture: str) -> Path:
    """A folder like that of save_llama, with another network."""
    save_llama(folder)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
    }
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, vocab_size=vocab, max_position_embeddings=64, **sizes)
    )
    network.save_pretrained(folder)
    return folder


def test_a_folder_is_scored_and_goes_on_only_if_its_network_is_causal(refused: Refused, tmp_path: Path) -> None:
    bert, mixtral = (str(other(tmp_path / name, name)) for name in ("bert", "mixtral"))
    refused(["samerun", "generate", bert, "It was"], f"the bert of {bert} sees later tokens", CODE)
    refused(["samerun", "evaluate", bert], "sees later tokens", CODE)
    refused(["samerun", "generate", mixtral, "It was", "--max-tokens", "3"], "It was", 0)
    refused(["samerun", "evaluate", mixtral], "loss", 0)
