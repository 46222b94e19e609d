"""Which models tensor parallelism divides, and into how many parts; what it cannot is refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from app.errors import PresetError
from app.init import filling, tensor_parallel
from app.task import Task
from app.tasks.causal_lm import model as networks
from app.tasks.causal_lm.sections import ModelRecipe

TINY: dict[str, Any] = {"architecture": "llama", "hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 96}


class Text(Task):
    """A language model as far as its network goes."""

    def __init__(self, vocab_size: int = 258, **settings: Any) -> None:
        self.recipe, self.vocab_size = ModelRecipe(**{**TINY, **settings}), vocab_size

    def model(self, _facts: Any) -> nn.Module:
        return networks.build(self.recipe, {"vocab_size": self.vocab_size, "sequence_length": 32})

    def init_module(self, model: nn.Module, _name: str, unit: nn.Module) -> None:
        networks.initialize(model, unit)


def on_meta(**settings: Any) -> nn.Module:
    model, _ = filling.made(Text(**settings), {}, seed=0)
    return model


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, 4),
        ({"key_value_heads": 2}, 2),
        ({"architecture": "mistral", "tie_embeddings": True}, 2),
        ({"vocab_size": 257}, 2),  # the head and the embedding stay whole
    ],
)
def test_what_divides(settings: dict[str, Any], parts: int) -> None:
    tensor_parallel.check(on_meta(**settings), parts)


@pytest.mark.parametrize(
    ("settings", "parts", "said"),
    [
        ({"architecture": "gpt2", "intermediate_size": None}, 2, "GPT2LMHeadModel has none: use fsdp2.yaml"),
        ({}, 3, r"num_attention_heads 4, .* evenly: --tensor-parallel must divide 4 for"),
        ({"intermediate_size": 90}, 4, r"outputs of gate_proj 90, .*inputs of down_proj 90 evenly: .* must divide 2 for"),
        ({"lora_rank": 2}, 2, "without LoRA adapters"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], parts: int, said: str) -> None:
    with pytest.raises(PresetError, match=said):
        tensor_parallel.check(on_meta(**settings), parts)


def test_real_weights_and_dropout_on_a_part_of_a_sample_are_refused() -> None:
    with pytest.raises(PresetError, match="needs a task that draws weights"):
        tensor_parallel.check(nn.Linear(2, 2), 2)
    model: Any = on_meta()
    model.model.layers[1].mlp.between = nn.Dropout(0.1)
    with pytest.raises(PresetError, match=r"cannot use dropout in model.layers.1.mlp.between"):
        tensor_parallel.check(model, 2)
