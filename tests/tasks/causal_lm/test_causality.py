"""A network that sees later tokens, or that cannot be trained, is refused by every command before data is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import Refused
from test_generate import save_llama
from transformers import AutoConfig, AutoModelForCausalLM

from app.errors import RecipeError
from app.tasks.causal_lm import causality
from app.tasks.causal_lm.configuration import network_config
from app.tasks.causal_lm.sections import ModelRecipe

CODE = RecipeError.exit_code
TINY = ("--recipe", "lm_tiny", "data.path=no/such/folder")


@pytest.mark.parametrize(
    ("architecture", "attention", "sentence"),
    [
        ("bert", "sdpa", "bert sees later tokens: its logits at position 0 change with the tokens from"),
        ("big_bird", "eager", "model.architecture=big_bird sees later tokens"),
        ("mixtral", "sdpa", "model.architecture=mixtral is a mixture of experts"),
        ("gpt_oss", "eager", "model.architecture=gpt_oss is a mixture of experts, which cannot be trained"),
        ("gemma2", "sdpa", "transformers has no gemma2 with model.attention=sdpa: set model.attention=eager"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_is_opened(
    refused: Refused, architecture: str, attention: str, sentence: str
) -> None:
    refused(["app.train", *TINY, f"model.architecture={architecture}", f"model.attention={attention}"], sentence, CODE)


def test_plan_refuses_what_training_refuses(refused: Refused) -> None:
    plan = ["samerun", "plan", "--recipe", "lm_tiny", "--devices", "2", "--device", "h100"]
    refused([*plan, "model.architecture=mixtral"], "mixtral is a mixture of experts", CODE)


@pytest.mark.parametrize(
    "keys",
    [
        {"architecture": "bert", "settings": {"is_decoder": True}},
        {"architecture": "gemma2", "attention": "eager"},
        {"architecture": "mistral"},
    ],
)
def test_causal_networks_pass(keys: dict[str, Any]) -> None:
    recipe = ModelRecipe(**keys)
    causality.check(network_config(recipe), recipe.attention, "it", document_masks="mistral" in keys.values(), to_train=True)


def other(folder: Path, architecture: str) -> Path:
    """A folder like that of save_llama, with another network."""
    save_llama(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, vocab_size=vocab, max_position_embeddings=64, intermediate_size=64, **sizes)
    )
    network.save_pretrained(folder)
    return folder


def test_a_folder_is_scored_and_goes_on_only_if_its_network_is_causal(refused: Refused, tmp_path: Path) -> None:
    bert, mixtral = (str(other(tmp_path / name, name)) for name in ("bert", "mixtral"))
    refused(["samerun", "generate", bert, "It was"], f"the bert of {bert} sees later tokens", CODE)
    refused(["samerun", "evaluate", bert], "sees later tokens", CODE)
    refused(["samerun", "generate", mixtral, "It was", "--max-tokens", "3"], "It was", 0)
    refused(["samerun", "evaluate", mixtral], "loss", 0)
