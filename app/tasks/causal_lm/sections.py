"""The sections of a recipe that trains a causal language model: its text as tokens, and the network.

Each key has its type, range, default and meaning (with its unit), as in `app/recipe/schema.py`. It needs no torch: login nodes
read it.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from app.errors import did_you_mean
from app.files import hub
from app.recipe.kinds import POSITIVE, Problem, Range, problem, weights_problem

NAMES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
"""transformers' common names for our keys; a configuration's `attribute_map` has the names of its own."""


@functools.cache
def architectures() -> Collection[str]:
    """Return the causal language models that transformers has, read from its source: importing it takes seconds, and torch.

    Empty if they cannot be found there: then the network itself is the check.
    """
    spec = importlib.util.find_spec("transformers")
    file = Path((spec and spec.origin) or "").parent / "models" / "auto" / "modeling_auto.py"
    text = (file.read_text() if file.exists() else "").partition("\nMODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2]
    return re.findall(r'\("([\w.-]+)", ', text.partition("\n)")[0])


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The text, as rows of tokens."""

    places: ClassVar[tuple[str, ...]] = ("path", "sources")
    by_step: ClassVar[tuple[str, ...]] = ("phases",)

    path: str | None = None
    """Token folder written by `samerun data tokenize`. `~` and variables are expanded. None: the book that comes with the
    package, one token per byte."""
    sources: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    """Mixture of token folders in place of path, such as [{path: data/web, weight: 0.7}, {path: data/code, weight: 0.3}].
    Weights may have any sum. A source is called by its folder, or by a name: key. The length of the run is train.steps
    (docs/tokens.md). None: no mixture."""
    phases: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    """Other weights from a step on, such as [{from_step: 8000, weights: {web: 0.5, code: 0.5}}]. A resumed run may change
    phases that begin after its checkpoint. None: the same weights in all steps."""
    mixture_window: Annotated[int, Range(ge=1, le=2**20)] = 65_536
    """Number of rows in which each source has exactly its share, rounded to whole rows."""
    sequence_length: Annotated[int | None, POSITIVE] = None
    """Sequence length: target tokens per row. None: the length of the packed rows, or else the model's number of
    positions."""
    document_masks: bool = False
    """Restart attention and positions at each document of a row, so that no document attends to another."""

    @property
    def folders(self) -> dict[str, str]:
        """Token folders by the name of their source; the one of `path` has none."""
        if self.sources is not None:
            return {_name(source): source["path"] for source in self.sources}
        return {} if self.path is None else {"": self.path}

    @property
    def first_folder(self) -> str | None:
        """A token folder with the tokenizer of the text; None: the text comes with the package."""
        return next(iter(self.folders.values()), None)

    def problem(self) -> tuple[str, str] | None:
        """Return the key and the problem of a mixture; None: there is none."""
        if self.sources is None:
            return None
        for source in self.sources:
            if not {"path", "weight"} <= source.keys() <= {"path", "weight", "name"} or not isinstance(source["path"], str):
                return "sources", "each source must have a path and a weight, and may have a name"
        names = [_name(source) for source in self.sources]
        if len({*names}) < len(names):
            return "sources", f"the sources are called {', '.join(names)}: give each another name, as in {{name: web2, ...}}"
        if text := weights_problem(names, [source["weight"] for source in self.sources], self.mixture_window):
            return "sources", text
        steps = [phase.get("from_step") for phase in self.phases or ()]
        if any(type(step) is not int for step in steps) or steps != sorted({1, *steps})[1:]:  # type: ignore[type-var]
            return "phases", "each phase must have a from_step, in ascending order from 2 on"
        for phase in self.phases or ():
            weights = phase.get("weights")
            if phase.keys() != {"from_step", "weights"} or not isinstance(weights, Mapping) or {*weights} != {*names}:
                return "phases", f"each phase must have weights, one for each of {', '.join(names)}; 0 leaves a source out"
            if text := weights_problem(names, [weights[name] for name in names], self.mixture_window):
                return "phases", text
        return None


def _name(source: Mapping[str, Any]) -> str:
    return str(source.get("name") or Path(source["path"]).name)


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The network, one of transformers."""

    not_learnt: ClassVar[tuple[str, ...]] = ("attention", "head")
    places: ClassVar[tuple[str, ...]] = ("path",)
    hub: ClassVar[tuple[str, ...]] = ("path",)
    not_left: ClassVar[tuple[str, ...]] = ("lora_rank", "lora_alpha", "lora_targets")

    architecture: str | None = None
    """Architecture, as transformers' model_type: gpt2, llama, qwen3, mistral, gemma, ... None: gpt2."""
    hidden_size: Annotated[int | None, POSITIVE] = None
    """Width of the hidden states. For this and the keys below, None: transformers' default."""
    layers: Annotated[int | None, POSITIVE] = None
    """Depth: number of transformer layers."""
    heads: Annotated[int | None, POSITIVE] = None
    """Attention heads per layer."""
    key_value_heads: Annotated[int | None, POSITIVE] = None
    """Key and value heads (grouped-query attention), a divisor of model.heads. None: as many as heads, or the architecture's
    default."""
    intermediate_size: Annotated[int | None, POSITIVE] = None
    """Width of the feed-forward network in each layer."""
    vocab_size: Annotated[int | None, Range(ge=2)] = None
    """Vocabulary size, at least the tokenizer's. None: the tokenizer's."""
    positions: Annotated[int | None, POSITIVE] = None
    """Longest sequence that the model accepts, in tokens. None: data.sequence_length, or else transformers' default."""
    tie_embeddings: bool | None = None
    """Share weights between the input embedding and the output layer."""
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Dropout rate of the embeddings and of each layer's output, if the architecture has such dropout (gpt2 does, llama does
    not). Attention has no dropout unless model.settings sets it."""
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    """Further settings of the architecture by transformers' names, such as {sliding_window: 1024, rms_norm_eps: 1e-5}."""
    balance_loss: Annotated[float, Range(ge=0)] = 0.0
    """Factor of the loss that balances a mixture of experts over each row (docs/language-models.md), such as 0.001. 0: none."""
    path: str | None = None
    """Folder with transformers' config.json, or hub:OWNER/NAME@REVISION, that describes the network and replaces the keys
    above. For the weights give train.init_from too, for downloads train.download=true."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """Attention implementation, by transformers' names: sdpa is torch's own, flash_attention_2 a separate package for GPUs."""
    head: Literal["auto", "whole", "chunked"] = "auto"
    """How the output layer's loss is computed. whole: from all logits together. chunked: some tokens at a time, in a fraction
    of the memory. auto: chunked for a vocabulary of 4096 tokens or more."""

    lora_rank: Annotated[int | None, POSITIVE] = None
    """Train only LoRA adapters of this rank, with peft, and freeze all other weights (docs/language-models.md). None: train
    all weights."""
    lora_alpha: Annotated[float | None, POSITIVE] = None
    """LoRA's alpha: updates are scaled by lora_alpha / lora_rank. None: twice lora_rank, a factor of 2."""
    lora_targets: tuple[str, ...] | None = None
    """Layers that get adapters, by the ends of their names, such as q_proj,v_proj. None: all linear layers but the last; in a
    mixture of experts, the linear layers of the attention."""

    @property
    def chosen(self) -> dict[str, Any]:
        """Return what is given of the network's size, by the names of the keys."""
        values = {key: getattr(self, key) for key in NAMES}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections of a recipe that only this task has."""

    why_grouped: ClassVar[str] = "each row is a sample"
    group_size: ClassVar[int] = 1
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)

    def contradictions(self) -> Iterator[Problem]:
        """Yield the problems of values that contradict each other."""
        model, length = self.model, self.data.sequence_length
        if self.data.sources is not None and self.data.path is not None:
            yield problem(self, "give one of them", "data.path", "data.sources")
        if self.data.phases is not None and self.data.sources is None:
            yield problem(self, "phases change the weights of sources: give these too", "data.phases", "data.sources")
        if found := self.data.problem():
            yield problem(self, found[1], f"data.{found[0]}")
        if model.architecture and (known := architectures()) and model.architecture not in known:
            hint = did_you_mean(model.architecture, known, otherwise="for example gpt2, llama, qwen3, mistral or gemma")
            yield problem(self, f"transformers has no such causal language model; {hint}", "model.architecture")
        for key in ("model.lora_alpha", "model.lora_targets"):
            if attrgetter(key)(self) is not None and not model.lora_rank:
                yield problem(self, "this is for adapters: set lora_rank too, for example to 8", key, "model.lora_rank")
        if hub.is_malformed(model.path):
            yield problem(self, hub.EXPECTED, "model.path")
        if model.path is not None:
            if keys := (*(["architecture"] if model.architecture else []), *model.chosen):
                is_there = model.path.startswith(hub.PREFIX) or Path(model.path).expanduser().exists()
                where = "" if is_there else "there is no such folder here, and "
                text = f"{where}the config.json of path sets {', '.join(keys)} too: leave path out, or set these keys to null"
                yield problem(self, text, f"model.{keys[0]}", "model.path")
            return
        if model.hidden_size and model.hidden_size % (model.heads or 1) and "head_dim" not in (model.settings or {}):
            yield problem(self, "the width must be a multiple of the heads", "model.hidden_size", "model.heads")
        if model.heads and model.heads % (model.key_value_heads or 1):
            yield problem(self, "heads must be a multiple of key_value_heads", "model.heads", "model.key_value_heads")
        if length and model.positions and length > model.positions:
            yield problem(self, "a row must not be longer than positions", "data.sequence_length", "model.positions")

    @property
    def is_mixture(self) -> bool:
        """Return True if the training samples are a mixture, which has no epochs."""
        return self.data.sources is not None

    @property
    def inputs(self) -> Mapping[str, str]:
        """Files and folders that must be there before the run, each by its key; `~` and variables are not filled in."""
        if self.data.problem():
            return {}
        path = self.model.path
        there = {f"data.sources, {name}," if name else "data.path": path for name, path in self.data.folders.items()}
        return {**there, **({} if path is None or path.startswith(hub.PREFIX) else {"model.path": path})}
