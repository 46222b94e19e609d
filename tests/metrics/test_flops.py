"""The arithmetic of a transformer, against the formula that everybody's MFU is made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from app.metrics import clock
from app.task import Loss

LAYERS, HEADS, SIZE, TOKENS, BATCH = 3, 4, 16, 64, 2
"""SIZE: numbers in a head."""


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=HEADS * SIZE, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, vocab_size=500, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens() -> torch.Tensor:
    return torch.empty(BATCH, TOKENS, dtype=torch.int64, device="meta")


def inputs() -> dict[str, Any]:
    """Without the mask transformers would look at the positions, which have no data."""
    mask = torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
    return {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}


def of_formula(model: nn.Module) -> float:
    """PaLM (arXiv:2204.02311), appendix B: 6 N + 12 L H Q T a token."""
    in_products = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return BATCH * TOKENS * (6.0 * in_products + 12 * LAYERS * HEADS * SIZE * TOKENS)


def test_a_transformer_takes_what_the_formula_says(llama: nn.Module) -> None:
    counted = clock.training_flops(llama, lambda called: called(**inputs()))
    assert counted == pytest.approx(of_formula(llama), rel=2e-4)  # the angles of the rotary positions are products too


def test_a_head_in_chunks_takes_what_a_whole_one_does(llama: Any) -> None:
    """Nothing of it was counted by torch: of a small model with a large vocabulary that is most of all."""

    def loss(called: Any) -> Loss:
        hidden = called(**inputs()).last_hidden_state.flatten(0, 1)
        weight = torch.empty_like(head.weight, device="meta", requires_grad=head.weight.requires_grad)
        options = nn.LinearCrossEntropyOptions()
        return Loss.of(F.linear_cross_entropy(hidden, weight, tokens().flatten(), reduction="sum", options=options), 1)

    head, embedding = llama.lm_head, llama.model.embed_tokens
    assert clock.training_flops(llama.model, loss) == pytest.approx(of_formula(llama), rel=2e-4)
    embedding.requires_grad_(False)  # so that the backward pass itself is counted
    head.requires_grad_(False)
    gradient = 2.0 * BATCH * TOKENS * head.weight.numel()
    assert clock.training_flops(llama.model, loss) == pytest.approx(of_formula(llama) - gradient, rel=2e-4)
