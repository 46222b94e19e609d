"""The sections of a recipe that trains a causal language model: its text as tokens, and the network.

Each key, its default and its meaning (with the unit) stand below, as in `app/recipe/schema.py`; the ranges and what contradicts
what stand at the end. Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from app.errors import RecipeError
from app.recipe.ranges import POSITIVE, Range, out_of_range


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The text, as rows of tokens."""

    places: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None
    """Token folder written by `samerun data tokenize`, or a folder with nanoGPT's train.bin and val.bin. `~` and variables are
    expanded. None: the book that comes with the package, one token per byte."""
    sequence_length: int | None = None
    """Sequence length: target tokens per row. None: the length of the packed rows, or else the number of positions of the
    model."""
    document_masks: bool = False
    """Restart attention and positions at each document of a row, so that no document attends to another."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The network, one of transformers."""

    not_learnt: ClassVar[tuple[str, ...]] = ("attention", "head", "download")
    places: ClassVar[tuple[str, ...]] = ("path",)
    not_left: ClassVar[tuple[str, ...]] = ("lora_rank", "lora_alpha", "lora_targets")

    architecture: str | None = None
    """Architecture, as transformers' model_type: gpt2, llama, qwen3, mistral, gemma, ... None: gpt2."""
    hidden_size: int | None = None
    """Width of the hidden states. For this and the keys below, None is transformers' default."""
    layers: int | None = None
    """Depth: number of transformer layers."""
    heads: int | None = None
    """Attention heads per layer."""
    key_value_heads: int | None = None
    """Key and value heads (grouped-query attention), a divisor of the attention heads; fewer take less memory. None: as many
    as heads, or the architecture's default."""
    intermediate_size: int | None = None
    """Width of the feed-forward network in each layer."""
    vocab_size: int | None = None
    """Vocabulary size, at least that of the tokenizer. None: that of the tokenizer."""
    positions: int | None = None
    """Longest sequence that the model takes, in tokens. None: data.sequence_length, or else transformers' default."""
    tie_embeddings: bool | None = None
    """Whether the input embedding and the output layer share their weights."""
    dropout: float = 0.0
    """Dropout rate of the embeddings and of each layer's output, where the architecture has such dropout (gpt2 has it, llama
    does not). Attention has no dropout unless model.settings sets it."""
    settings: tuple[str, ...] | None = None
    """Further settings of the architecture, each NAME=VALUE with the names of transformers' configuration, such as
    sliding_window=1024,rms_norm_eps=1e-5. A value with commas must be an item of a YAML list."""
    path: str | None = None
    """Folder with transformers' config.json, or a hub name, that describes the network; it replaces the keys above. It gives
    no weights: train.init_from does."""
    revision: str | None = None
    """Commit of the hub name in model.path, all 40 digits."""
    download: bool = False
    """Whether one process per node may download the config.json of a hub name."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """Attention implementation, by transformers' names: sdpa is torch's own, flash_attention_2 a separate package for GPUs."""
    head: Literal["auto", "whole", "chunked"] = "auto"
    """How the output layer's loss is computed: whole, from all logits at once; or chunked, some tokens at a time, which takes
    a fraction of the memory. auto: chunked for a vocabulary of 4096 tokens or more."""

    lora_rank: int | None = None
    """Train only LoRA adapters of this rank, by peft (pip install "samerun[lora]"): the product of two small matrices is added
    to the weight of each chosen layer. All other weights are frozen. None: no adapters, everything is trained."""
    lora_alpha: float | None = None
    """LoRA's alpha: the product is multiplied by lora_alpha / lora_rank. None: twice lora_rank, a factor of 2."""
    lora_targets: tuple[str, ...] | None = None
    """Layers that get adapters, by the ends of their names, such as q_proj,v_proj. None: all linear layers but the last."""

    @property
    def chosen(self) -> dict[str, Any]:
        """Return what is given of the network's size, by the names of the keys."""
        keys = ("hidden_size", "layers", "heads", "key_value_heads", "intermediate_size", "vocab_size", "positions")
        values = {key: getattr(self, key) for key in (*keys, "tie_embeddings")}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def more(self) -> dict[str, Any]:
        """Return `settings` by name, each value as JSON reads it, or the text. Raises ValueError for one without a value."""
        return dict(_setting(text) for text in self.settings or ())

    @property
    def is_named(self) -> bool:
        """Whether `path` is a name of the hub, `owner/name`, and no folder."""
        return self.path is not None and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", self.path)) and not Path(self.path).is_dir()


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All that a recipe says of this task alone. Raises RecipeError for what cannot be."""

    why_grouped: ClassVar[str] = "each row is a sample"
    group_size: ClassVar[int] = 1
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)

    def __post_init__(self) -> None:
        problems = [*out_of_range(self, _RANGES), *_of_settings(self.model), *_of_adapters(self.model)]
        problems += _of_path(self.model) if self.model.path is not None else _of_sizes(self)
        if problems:
            raise RecipeError(*problems)

    @property
    def inputs(self) -> Mapping[str, str]:
        """Files and folders that must be there before the run, each by its key; `~` and variables are not filled in."""
        there = {"data.path": self.data.path, "model.path": None if self.model.is_named else self.model.path}
        return {key: path for key, path in there.items() if path is not None}


_RANGES: Mapping[str, Range] = {
    "data.sequence_length": POSITIVE,
    "model.hidden_size": POSITIVE, "model.layers": POSITIVE, "model.heads": POSITIVE, "model.key_value_heads": POSITIVE,
    "model.intermediate_size": POSITIVE, "model.vocab_size": Range(2), "model.positions": POSITIVE,
    "model.dropout": Range(0, 1, open_high=True), "model.lora_rank": POSITIVE, "model.lora_alpha": POSITIVE,
}  # fmt: skip


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise ValueError(f"model.settings has {text!r}: each must be NAME=VALUE, as in rms_norm_eps=1e-5")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value.strip()


def _of_settings(model: ModelRecipe) -> list[str]:
    try:
        names = [_setting(text)[0] for text in model.settings or ()]
    except ValueError as error:
        return [str(error)]
    return [f"model.settings has {name} twice" for name in sorted(set(names)) if names.count(name) > 1]


def _of_adapters(model: ModelRecipe) -> list[str]:
    given = {"lora_alpha": model.lora_alpha, "lora_targets": model.lora_targets}
    alone = () if model.lora_rank else [key for key, value in given.items() if value is not None]
    return [
        f"model.{key} is {given[key]!r}, which is for adapters, but model.lora_rank is null: set it, for example to 8"
        for key in alone
    ]


def _of_path(model: ModelRecipe) -> list[str]:
    said = ("architecture",) if model.architecture else ()
    problems = [
        f"model.{key} and model.path are both set, and the config.json of model.path sets {key} too: remove one"
        for key in (*said, *model.chosen)
    ]
    if not model.is_named:
        if model.revision is not None:
            problems.append(
                f"model.revision is for a model on the hub, but model.path is {model.path}, a folder here: remove "
                "model.revision"
            )
    elif model.revision is None or not re.fullmatch("[0-9a-f]{40}", model.revision):
        problems.append(
            f"model.revision is {model.revision}: for {model.path} on the hub it must be a commit, with all "
            "40 hexadecimal digits, because branches and tags move; if model.path is meant to be a folder, "
            "it does not exist"
        )
    return problems


def _of_sizes(sections: Sections) -> list[str]:
    model, problems = sections.model, []
    if model.revision is not None:
        problems.append("model.revision is for a model on the hub, but model.path is null: remove it")
    if model.hidden_size and model.heads and model.hidden_size % model.heads and "head_dim" not in str(model.settings):
        problems.append(
            f"model.hidden_size is {model.hidden_size} and model.heads {model.heads}: the width must be a multiple of the heads"
        )
    if model.heads and model.key_value_heads and model.heads % model.key_value_heads:
        problems.append(
            f"model.heads is {model.heads} and model.key_value_heads {model.key_value_heads}: the heads must "
            "be a multiple of these"
        )
    length = sections.data.sequence_length
    if length and model.positions and length > model.positions:
        problems.append(
            f"data.sequence_length is {length} and model.positions {model.positions}: a row must not be "
            "longer than model.positions"
        )
    return problems
