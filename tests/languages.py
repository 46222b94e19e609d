"""Texts, networks and rows for tests of language models; rows are read here without the code that is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
"""By transformers' common names. The vocabulary is that of bytes."""


def save_network(folder: Path, architecture: str = "llama", **settings: Any) -> Path:
    """A folder of transformers with random weights, drawn by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {
        "llama": {"intermediate_size": 128, "num_key_value_heads": 2},
        "bert": {"intermediate_size": 64},
        "mixtral": {"intermediate_size": 64, "num_key_value_heads": 4, "num_local_experts": 4},
        "olmoe": {"intermediate_size": 64, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
        "qwen2_moe": {
            "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        "qwen3_moe": {
            "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16,
        },
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 256},  # dropout is no part of this
    }[architecture]  # fmt: skip
    config = AutoConfig.for_model(architecture, **{**TINY, **own, "bos_token_id": None, "eos_token_id": None, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_tokens(folder: Path, tokens: np.ndarray, vocabulary: int) -> Path:
    """A token folder of one document, the same for training and validation, without a tokenizer's files."""
    from app.tasks.causal_lm.data.token_writer import writing

    about = {"kind": "made-up", "name": "made-up", "digest": None, "vocab_size": vocabulary}
    with writing(folder, about, {}, token_bytes=None) as writer:
        for split in ("train", "validation"):
            writer.append(split, tokens, np.array([len(tokens)]), text_bytes=0)
    return folder


def write_answers(folder: Path, *, pairs: int = 400, sequence_length: int | None = None, longest: int = 200) -> Path:
    """A token folder of prompts and answers cut out of the embedded book: 1 to 200 tokens of answer, very unevenly."""
    from app.tasks.causal_lm.data.store import embedded_documents
    from app.tasks.causal_lm.data.token_writer import writing
    from app.tasks.causal_lm.data.tokenizers import Bytes

    random, tokenizer = np.random.default_rng(7), Bytes()
    with writing(
        folder,
        tokenizer.about,
        tokenizer.files(),
        token_bytes=tokenizer.token_bytes,
        sequence_length=sequence_length,
        answers=True,
    ) as writer:
        for split, number in (("train", pairs), ("validation", 40)):
            text = b" ".join(embedded_documents()[split])
            for _ in range(number):
                prompt, answer = int(random.integers(4, 40)), round(longest ** random.random())
                begin = int(random.integers(len(text) - prompt - answer))
                tokens = tokenizer.document(text[begin : begin + prompt + answer - 1])  # and its end, which is of the answer
                counted = np.arange(len(tokens)) >= prompt
                writer.append(split, tokens, np.array([len(tokens)]), counted=counted, text_bytes=len(tokens) - 1)
    return folder


def rows(folder: Path, split: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole rows of a token folder that is not packed: int64 [N, S + 1], and bool [N, S], which targets count."""
    told = json.loads((folder / "tokens.json").read_text())
    tokens = np.fromfile(folder / f"{split}.bin", told["dtype"]).astype(np.int64)
    bits = np.fromfile(folder / f"{split}.counted", np.uint8) if told["answers"] else None
    counted = np.ones(len(tokens), bool) if bits is None else np.unpackbits(bits, bitorder="little")[: len(tokens)].astype(bool)
    begins = np.arange((len(tokens) - 1) // length) * length
    places = begins[:, None] + np.arange(length + 1)
    return tokens[places], counted[places[:, 1:]]
