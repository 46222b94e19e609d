"""The network of a language model: one of transformers, by its configuration, that gives its loss by itself.

transformers is imported when a model is built, and no more of it than that model needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.environment.topology import listed
from app.errors import RecipeError, RunFolderError
from app.files import other_libraries
from app.init import model_tensors
from app.tasks.causal_lm import lora
from app.tasks.causal_lm.configuration import config_of
from app.tasks.causal_lm.head import Head, nats_of
from app.tasks.causal_lm.sections import ModelRecipe

PLAIN = frozenset(
    {
        "gemma", "gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2",
        "qwen3", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Families whose logits are what the last layer makes of the base model's output, and nothing more: shown by a test for each.
Others scale or cap them, or may: of these all logits are computed, by their own `forward`."""
LARGE_VOCABULARY = 4096
"""From so many tokens on the head goes by chunks: the logits then are several times what the layers keep for the backward pass
(a model of width H and L layers keeps about 34 H L bytes a token in half precision, Korthikanti et al. 2022, arXiv:2205.05198,
and logits with their gradient and logarithms 10 V), and the products are large enough for the chunks to cost no time."""


def build(recipe: ModelRecipe, facts: Mapping[str, Any]) -> nn.Module:
    """Return the network for samples with these facts, in training mode; raises RecipeError if it cannot be.

    On torch's meta device, if that is the default one, it has no weights. Otherwise they are drawn from the global generator.
    """
    model = _with_loss(recipe, facts, lambda kind, config: kind(config))
    if recipe.lora_rank:
        lora.add(model, recipe)
    return model.train()


def load(recipe: ModelRecipe, folder: Path, facts: Mapping[str, Any]) -> nn.Module:
    """Return the network of a folder of transformers, with its weights, on the CPU and in evaluation mode.

    `recipe` has the folder as its `path`. Raises RecipeError if the text does not suit it, RunFolderError if it cannot be read.
    """

    read = functools.partial(read_folder, folder)
    return _with_loss(recipe, facts, read).eval()


def read_folder(folder: Path, kind: Any, config: Any = None) -> nn.Module:
    """Return the model that a class of transformers makes of a folder, with all its weights, and no others.

    Raises RunFolderError if it cannot, or if weights are missing, left over, contradictory or of another shape.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: nn.Module
    try:
        model, told = other_libraries.model(kind, folder, config=config)
    except Exception as error:  # whatever a library that reads files may raise
        why = str(error).strip().partition("\n")[0]
        raise RunFolderError(f"transformers cannot load the model of {folder}: {why}") from error
    if wrong := model_tensors.loading_differences(model, told):
        raise RunFolderError(
            f"the weights of {folder} belong to another model than its config.json: {listed([*wrong.values()])}. "
            "Save the whole model there again, or correct config.json"
        )
    return model


def _with_loss(recipe: ModelRecipe, facts: Mapping[str, Any], made: Callable[[Any, Any], nn.Module]) -> nn.Module:
    """Return what `made` makes of a class of transformers, which gives its loss by itself then, and its configuration."""
    config = config_of(recipe, vocab_size=facts["vocab_size"], sequence_length=facts["sequence_length"])
    chunked = recipe.head == "chunked" or (recipe.head == "auto" and config.vocab_size >= LARGE_VOCABULARY)
    is_plain = config.model_type in PLAIN
    if recipe.head == "chunked" and not is_plain:
        known = ", ".join(sorted(PLAIN))
        raise RecipeError(
            f"model.head is chunked, which does not work for {config.model_type}: set auto or whole. It works for {known}"
        )
    config._attn_implementation = recipe.attention
    try:
        model = made(class_for(config), config)
    except (ImportError, ValueError) as error:
        raise RecipeError(refused(config, recipe.attention, error)) from error
    last = model.get_output_embeddings()  # type: ignore[operator]
    if is_plain and type(last) is nn.Linear:
        model.set_output_embeddings(Head(last, chunked=chunked))  # type: ignore[operator]
    return model


def refused(config: Any, attention: str, error: Exception) -> str:
    """Return the sentence for a network that transformers cannot build or compute, with the first line of its own."""
    why = str(error).strip().partition("\n")[0] or repr(error)
    if attention != "eager" and "does not support an attention implementation" in why:
        return f"transformers has no {config.model_type} with model.attention={attention}: set model.attention=eager"
    return f"transformers refuses a {config.model_type} with model.attention={attention}: {why}"


def initialize(model: Any, unit: nn.Module) -> None:
    """Draw the weights of a part of the model by transformers' rules for it, from torch's global generator; buffers too."""
    for parameter in (*unit.parameters(), *unit.buffers()):
        vars(parameter).pop("_is_hf_initialized", None)
    for module in _children_first(unit):
        vars(module).pop("_is_hf_initialized", None)
        model._init_weights(module)
        lora.initialize(module)


def _children_first(module: nn.Module) -> list[nn.Module]:
    """transformers' order: a rule for a whole, such as one that scales by the depth, comes after those of its parts."""
    return [*(below for child in module.children() for below in _children_first(child)), module]


class _GivesLoss:
    """What a class of transformers gets before it: with labels, `forward` returns a loss without all logits."""

    def forward(self, *args: Any, labels: Tensor | None = None, by_row: bool = False, **named: Any) -> Any:
        """Return what transformers' own does; with labels, int64 [B, S], shifted already, their sum of nats, or [B] `by_row`.

        Labels of -100 do not count. There is neither a cache nor an attention mask then: with either, the documents of a row,
        whose `position_ids` begin anew, would see each other.
        """
        if labels is None:
            return super().forward(*args, **named)  # type: ignore[misc]
        if labels.is_meta:  # transformers would look where positions begin anew
            length = labels.shape[1]
            named["attention_mask"] = torch.empty(1, 1, length, length, dtype=torch.bool, device="meta")
        head = self.get_output_embeddings()  # type: ignore[attr-defined]
        if isinstance(head, Head):
            hidden = self.base_model(*args, use_cache=False, **named).last_hidden_state  # type: ignore[attr-defined]
            return head(hidden, labels, by_row=by_row)
        logits = super().forward(*args, use_cache=False, **named).logits  # type: ignore[misc]
        return nats_of(logits, labels, by_row=by_row)


def class_for(config: Any) -> type[nn.Module]:
    """Return the class of transformers for a configuration, which gives its loss by itself. Raises RecipeError."""
    return _class_of(_base_of(config))


@functools.cache
def _class_of(base: Any) -> type[nn.Module]:
    """Return the class of transformers with `_GivesLoss`, under its own name: its config.json and `generate` go by that."""

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return _GivesLoss.forward(self, *args, **named)

    forward = functools.wraps(base.forward)(forward)  # its signature says what `generate` may pass
    return type(base.__name__, (_GivesLoss, base), {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward})


def _base_of(config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise RecipeError(f"the network is a {config.model_type}, for which transformers has no causal language model")
    return getattr(transformers, name)
