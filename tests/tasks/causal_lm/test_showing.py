"""The texts of an evaluation: how a model goes on with the beginnings of rows, by plain forward passes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.tasks.causal_lm.data import showing
from app.tasks.causal_lm.data.tokenizers import Bytes


def llama(sharpness: float) -> Any:
    """A Llama of bytes with random weights; the sharper, the surer of its next byte."""
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         max_position_embeddings=256, initializer_range=0.5)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


@torch.no_grad()
def test_it_goes_on_as_the_model_does() -> None:
    """One that is sure writes what transformers' greedy generation writes, and is asked once for each token."""
    model, calls = llama(1e4), []
    tokens = torch.randint(97, 122, (3, 200), generator=torch.Generator().manual_seed(1))

    def counted(**named: Any) -> Any:
        calls.append(named["input_ids"].shape)
        return model(**named)

    given, added = showing.continuations(counted, tokens)
    assert torch.equal(given, tokens[:, : showing.BEGINNING])
    assert calls == [(3, showing.BEGINNING + number) for number in range(showing.ADDED)]
    expected = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=showing.ADDED)
    assert torch.equal(torch.cat([given, added], dim=1), expected)


@torch.no_grad()
def test_the_generator_decides_and_nothing_else() -> None:
    model, tokens = llama(1.0), torch.randint(97, 122, (2, 64), generator=torch.Generator().manual_seed(1))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(showing.texts(model, tokens, Bytes()))
    assert found[0] == found[1]
    assert [title for title, _ in found[0]] == [bytes(row[: showing.BEGINNING].tolist()).decode() for row in tokens]
    assert found[0] != found[2]


@torch.no_grad()
def test_the_draws_have_the_shares_of_the_model() -> None:
    """Of 4000 rows alike: chi-squared of the 257 counts, within five standard deviations of its mean."""
    model, tokens = llama(0.1), torch.full((4000, 2), 97)
    expected = 4000 * model(tokens[:1, :1]).logits[0, -1].double().softmax(-1)
    torch.manual_seed(0)
    _, added = showing.continuations(model, tokens)
    counts = torch.bincount(added[:, 0], minlength=257)
    assert float(((counts - expected) ** 2 / expected).sum()) < 256 + 5 * (2 * 256) ** 0.5
