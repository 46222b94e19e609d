"""Tiny models of transformers, as tasks that have `init`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from app.task import Task

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}


def llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16, **SIZES, **NO_TOKENS}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))


def twelve(**settings: Any) -> LlamaForCausalLM:
    """Twelve heads, and sizes that divide as they do."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 96}
    return llama(**sizes, **settings)


def gpt2() -> GPT2LMHeadModel:
    """Its head is its embedding."""
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=101, n_positions=16, **dropouts, **NO_TOKENS))


def init(model: PreTrainedModel, unit: nn.Module) -> None:
    """Fill a unit by the rules of transformers, children first."""
    for child in unit.children():
        init(model, child)
    model._init_weights(unit)


class Drawn(Task):
    """A task as far as its model goes."""

    def __init__(self, build: Any) -> None:
        self.build = build

    def model(self, _facts: Any) -> nn.Module:
        with no_init_weights():
            model: nn.Module = self.build()
        return model

    def init_module(self, model: Any, _name: str, unit: nn.Module) -> None:
        init(model, unit)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(tokens, labels=tokens, use_cache=False).loss
    return found


class Plain(Task):
    """A task without `init_module`, whose model transformers builds and fills."""

    def model(self, _facts: Any) -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(llama().config)
        return model
