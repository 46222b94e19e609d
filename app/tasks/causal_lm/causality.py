"""Checks that a network of transformers predicts tokens from earlier ones alone, and that it can be trained.

Names do not decide: transformers lists encoders among its causal language models, a setting can turn the mask off, and whether
documents stay apart depends on the architecture. A network is computed that has the same configuration, but few layers and
heads and a small vocabulary, so that the check costs the same for every size of model.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import RecipeError
from app.tasks.causal_lm import model as networks
from app.tasks.causal_lm.configuration import OTHER_NAMES

_LENGTH, _VOCABULARY, _WIDTH = 24, 64, 64
_CHANGED_FROM = (1, 6, 13, 23)
"""Positions from which on the tokens of a row are changed."""
_SECOND_DOCUMENT = 9
"""Position at which the second document of a row begins."""
_MOST = 1e-5
"""Change of logits that is rounding, as a share of the largest. Experts, which get their tokens in another order, change by
7e-7; the weakest encoder, roc_bert, by 3e-4."""
_LARGEST = 500_000_000
"""Parameters of the largest network that is computed if nothing can be made smaller."""
_FIRST_WORD = 3
"""Tokens below this one can be padding, or begin and end a text."""


def check(config: Any, attention: str, where: str, *, document_masks: bool = False, to_train: bool = False) -> None:
    """Raise RecipeError for a configuration whose network sees later tokens, or other documents of a row despite their masks.

    `to_train`: or is a mixture of experts that cannot be trained. `where` names the configuration to people.
    """
    if attention not in ("sdpa", "eager"):
        attention = "sdpa"  # which needs no GPU, and has the same masks
    failed: Exception = RecipeError(f"{where} is too large to check whether it sees later tokens")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for few_layers, few_heads in itertools.product((True, False), (True, False)):
            try:
                network = _drawn(_smaller(config, attention, few_layers=few_layers, few_heads=few_heads))
                if network is None:
                    continue
                logits = _logits(network, document_masks=document_masks)
            except Exception as error:  # whatever transformers raises for sizes that do not suit it
                failed = error
                continue
            _check_order(logits, where, config, document_masks=document_masks)
            has_experts = any(name.endswith(("experts", "moe")) for name, _ in network.named_modules())
            if to_train and has_experts and config.model_type not in networks.MIXTURES:
                known = ", ".join(sorted(networks.MIXTURES))
                raise RecipeError(f"{where} is a mixture of experts that cannot be trained; choose {known}")
            return
    if isinstance(failed, RecipeError):
        raise failed
    raise RecipeError(networks.refused(config, attention, failed)) from failed


def _smaller(config: Any, attention: str, *, few_layers: bool, few_heads: bool) -> Any:
    """Return a copy of a configuration with a small vocabulary; with one layer of each type, and with 1 or 2 heads."""
    copied = copy.deepcopy(config)
    text = copied.get_text_config()
    names = {field.name for field in dataclasses.fields(text)}
    values: dict[str, Any] = {"vocab_size": _VOCABULARY, "pad_token_id": 1}  # some count positions by the padding
    if isinstance(positions := getattr(text, "max_position_embeddings", None), int) and positions < 2 * _LENGTH:
        values["max_position_embeddings"] = 2 * _LENGTH
    if few_layers:
        layers = text.num_hidden_layers
        lists = {name: it for name in names if isinstance(it := getattr(text, name, None), list) and len(it) == layers}
        types = [getattr(text, name, None) or [] for name in ("layer_types", "layers_block_type")]
        depth = max([2, *(1 + kinds.index(kind) for kinds in (*types, *lists.values()) for kind in kinds)])
        values |= {name: it[:depth] for name, it in lists.items()} | {"num_hidden_layers": min(depth, layers)}
    if few_heads:
        heads, key_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        width = 2 * (text.hidden_size // heads)
        values |= {"num_attention_heads": 2, "num_key_value_heads": 2 if key_heads == heads else 1}
        values["hidden_size"] = -(-width // _WIDTH) * _WIDTH if "head_dim" in names else width
        feed_forward = ("intermediate_size", *OTHER_NAMES["intermediate_size"])
        values |= {name: _WIDTH for name in feed_forward if isinstance(getattr(text, name, None), int)}
    for name, value in values.items():
        if text.attribute_map.get(name, name) in names:
            setattr(text, name, value)
    copied._attn_implementation = attention
    return copied


def _drawn(config: Any) -> nn.Module | None:
    """Return a network with random weights, none of them 0, in evaluation mode; None: it is too large."""
    kind = networks.class_for(config)
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in kind(config).parameters()) > _LARGEST:
            return None
    network = kind(config).float().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return network


@torch.no_grad()
def _logits(network: nn.Module, *, document_masks: bool) -> Tensor:
    """Return the logits of a row, then with its tokens changed from each position on, then with another first document."""
    row = torch.randint(_FIRST_WORD, _VOCABULARY, (_LENGTH,))
    other = _FIRST_WORD + (row - _FIRST_WORD + 7) % (_VOCABULARY - _FIRST_WORD)
    places = torch.arange(_LENGTH)
    rows = [row, *(torch.where(places >= first, other, row) for first in _CHANGED_FROM)]
    named = {}
    if document_masks:
        rows.append(torch.where(places < _SECOND_DOCUMENT, other, row))
        named["position_ids"] = (places - _SECOND_DOCUMENT * (places >= _SECOND_DOCUMENT)).expand(len(rows), -1)
    found: Tensor = network(input_ids=torch.stack(rows), use_cache=False, **named).logits
    return found


def _check_order(logits: Tensor, where: str, config: Any, *, document_masks: bool) -> None:
    most = _MOST * logits[0].abs().max()
    for first, changed in zip(_CHANGED_FROM, logits[1:], strict=False):
        moved = ((changed - logits[0])[:first].abs() > most).any(-1)
        if bool(moved.any()):
            remedy = "choose a causal architecture, such as gpt2 or llama"
            if getattr(config, "is_decoder", None) is False:
                remedy += ", or set model.settings={is_decoder: true}"
            raise RecipeError(
                f"{where} sees later tokens: its logits at position {int(moved.nonzero()[-1])} change with the tokens from "
                f"position {first} on, so it cannot learn to predict the next token; {remedy}"
            )
    if document_masks and bool(((logits[-1] - logits[0])[_SECOND_DOCUMENT:].abs() > most).any()):
        raise RecipeError(
            f"data.document_masks is true, and {where} sees the other documents of a row all the same: its logits at position "
            f"{_SECOND_DOCUMENT} and later change with the document before; set data.document_masks=false, or choose an "
            "architecture that keeps them apart, such as llama"
        )
