"""A network that sees later tokens, or that cannot be trained, is refused by every command before data is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import Refused
from test_generate import save_llama

from app.errors import RecipeError
from app.tasks.causal_lm import causality
from app.tasks.causal_lm.configuration import network_config
from app.tasks.causal_lm.sections import ModelRecipe

CODE = RecipeError.exit_code
TRAIN = ("app.train", "--recipe", "lm_tiny", "data.path=no/such/folder")
PLAN = ("samerun", "plan", "--recipe", "lm_tiny", "--devices", "2", "--device", "h100")


@pytest.mark.parametrize(
    ("command", "architecture", "sentence"),
    [
        (TRAIN, "bert", "bert sees later tokens: its logits at position 0 change with the tokens from"),
        (TRAIN, "phimoe", "model.architecture=phimoe is a mixture of experts that cannot be trained; choose gpt_oss, mixtral"),
        (PLAN, "phimoe", "phimoe is a mixture of experts"),
        (TRAIN, "gemma2", "transformers has no gemma2 with model.attention=sdpa: set model.attention=eager"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_is_opened(
    refused: Refused, command: tuple[str, ...], architecture: str, sentence: str
) -> None:
    refused([*command, f"model.architecture={architecture}"], sentence, CODE)


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


def test_a_folder_is_scored_and_goes_on_only_if_its_network_is_causal(refused: Refused, tmp_path: Path) -> None:
    bert, mixtral = (str(save_llama(tmp_path / name, name)) for name in ("bert", "mixtral"))
    refused(["samerun", "generate", bert, "It was"], f"the bert of {bert} sees later tokens", CODE)
    refused(["samerun", "evaluate", bert], "sees later tokens", CODE)
    refused(["samerun", "generate", mixtral, "It was", "--max-tokens", "3"], "It was", 0)
    refused(["samerun", "evaluate", mixtral], "loss", 0)
