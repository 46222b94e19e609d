"""Causal language models: each token is predicted from those before it.

Shapes: B rows in a batch, S tokens a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from app.data.draws import Draws
from app.data.mixture import Mixture
from app.data.samples import Batch, Splits
from app.errors import DataError, RecipeError
from app.files import text_files
from app.task import Adapters, FileParts, Form, Loss, Scores, Split, Table, Task, Totals
from app.tasks.causal_lm import causality, configuration, generate
from app.tasks.causal_lm import model as networks
from app.tasks.causal_lm.configuration import network_config
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.model import IGNORED
from app.tasks.causal_lm.sections import Sections


class CausalLM(Task):
    """Predicts the next token."""

    monitor: tuple[str, Literal["max", "min"]] = ("loss", "min")
    """The best checkpoint has the smallest loss a token."""
    count_unit = "tokens"

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self._parameters = 0

    # Data -------------------------------------------------------------------------------------------------------------

    def check_training(self) -> None:
        """Raise RecipeError for a network that sees later tokens, or cannot be trained."""
        self._check(to_train=True)

    def _check(self, *, to_train: bool) -> None:
        recipe = self._sections.model
        config = network_config(recipe)
        where = (
            f"model.path={recipe.path}, a {config.model_type}," if recipe.path else f"model.architecture={config.model_type}"
        )
        masks = self._sections.data.document_masks
        causality.check(config, recipe.attention, where, document_masks=masks, to_train=to_train)
        if to_train:
            networks.check_routing(config, recipe)

    def samples(self, split: Split) -> Rows | Mixture | None:
        """Open a split as rows, of one text or of a mixture; None: the text has no such split.

        Raises DataError if sources of a mixture have other tokens, or one has nothing to train on.
        """
        data = self._sections.data
        key = "data.path" if data.sources is None else "data.sources"
        splits = {name: store.open_split(Path(text_files.filled_in(key, path)), split) for name, path in data.folders.items()}
        opened = {name: tokens for name, tokens in (splits or {"": store.open_embedded(split)}).items() if tokens is not None}
        if not opened:
            return None
        length = data.sequence_length or next(filter(None, (tokens.sequence_length for tokens in opened.values())), None)
        if length is None:
            length = configuration.positions(network_config(self._sections.model))
        settings = {"document_masks": data.document_masks, "training": split == "train"}
        rows = {name: Rows(tokens, length, **settings) for name, tokens in opened.items()}
        if data.sources is None:
            return rows[""]
        if split == "train" and (missing := [name for name in data.folders if name not in rows]):
            raise DataError(f"{data.folders[missing[0]]} (data.sources) has no training split: tokenize it with one")
        digests = {name: str(it.facts["tokenizer"]["digest"]) for name, it in rows.items()}
        if len({*digests.values()}) > 1:
            found = ", ".join(f"{name} with {digest}" for name, digest in digests.items())
            raise DataError(f"the texts of data.sources have different tokenizers ({found}): tokenize all with the same one")
        if any(it.some_count for it in rows.values()):  # batches of all sources have the same fields
            for it in rows.values():
                it.some_count = True
        return self._mixture(rows, is_training=split == "train")

    def _mixture(self, rows: Mapping[str, Rows], *, is_training: bool) -> Mixture:
        data = self._sections.data
        weights = dict(zip(data.folders, (source["weight"] for source in data.sources or ()), strict=True))
        phases = {phase["from_step"]: phase["weights"] for phase in data.phases or () if is_training}
        return Mixture(
            sources=rows,
            weights=[weights[name] for name in rows],
            window=data.mixture_window,
            phases={step: [of_phase[name] for name in rows] for step, of_phase in phases.items()},
        )

    def metadata_without_data(self) -> dict[str, Any]:
        """Return the metadata that the recipe alone gives, to plan with. Raises DataError if it names no vocabulary."""
        data, network = self._sections.data, self._sections.model
        unknown = f"the token folder {data.first_folder} cannot be opened, and without it"
        if network.path is None and network.vocab_size is None:
            raise DataError(f"{unknown} the vocabulary is unknown: set model.vocab_size, or correct data.path")
        config = network_config(network, sequence_length=data.sequence_length)
        length = data.sequence_length or configuration.positions(config)
        if length is None:
            raise DataError(f"{unknown} the length of a row is unknown: set data.sequence_length, or correct data.path")
        sizes = {"vocab_size": config.vocab_size, "sequence_length": length}
        return {**sizes, "tokenizer": {}, "document_masks": data.document_masks}

    def data_digests(self) -> dict[str, str]:
        """Return a digest of what model.path says the network is."""
        return configuration.digest(self._sections.model)

    def notes(self, data: Splits) -> list[str]:
        """Return a sentence on the training text: how large it is, and what is left out."""
        sources = data.train.sources.items() if isinstance(data.train, Mixture) else [("", data.train)]
        return [f"{name and f'source {name}: '}{self._note(rows)}" for name, rows in sources]

    def _note(self, rows: Rows) -> str:
        tokens, count = len(rows.split.tokens), len(rows.split.documents) - 1
        documents = f"{count:,} document{'s' * (count != 1)}"
        dropped = f"; the last {rows.dropped_targets} do not fill a row" if rows.dropped_targets else ""
        text = f"{tokens:,} training tokens of {documents}, in {len(rows):,} rows of {rows.sequence_length}{dropped}"
        return f"{text}; tokenizer {rows.split.tokenizer['name']}, {rows.split.vocab_size:,} tokens"

    def adapt_samples(self, samples: Rows, metadata: Mapping[str, Any]) -> Rows:
        """Return other text, if the model has the same tokens. Raises DataError if not."""
        theirs, ours = samples.facts["tokenizer"].get("digest"), metadata["tokenizer"].get("digest")
        if theirs != ours:
            raise DataError(
                f"the text was tokenized with {theirs}, and the model was trained with {ours}: tokenize the "
                "text with the model's tokenizer (samerun data tokenize)"
            )
        sizes = {name: metadata[name] for name in ("vocab_size", "sequence_length")}
        most = configuration.positions(network_config(self._sections.model, **sizes))
        if most and samples.sequence_length > most:
            raise DataError(f"rows have {samples.sequence_length} tokens, the model takes {most}: lower data.sequence_length")
        return samples

    # Training ---------------------------------------------------------------------------------------------------------

    def model(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the network for text with this metadata."""
        network = networks.build(self._sections.model, metadata)
        self._parameters = sum(parameter.numel() for parameter in network.parameters())
        return network

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:  # noqa: ARG002
        """Draw the weights of a unit of the model by transformers' rules for it, and fill its buffers."""
        networks.initialize(model, module)

    def head(self, model: nn.Module) -> str:
        """Return the name of the layer whose outputs are tokens."""
        last = model.get_output_embeddings()  # type: ignore[operator]
        return str(next(name for name, module in model.named_modules() if module is last))

    def preprocess(self, batch: Batch, rng: Draws | None, *, form: Form) -> Batch:  # noqa: ARG002
        """Return `input_ids` and `labels`, int64 [B, S], `position_ids` where documents are masked, and `bytes` where known."""
        tokens = batch["tokens"].long()
        labels = tokens[:, 1:]
        if "counted" in batch:
            labels = labels.masked_fill(~batch["counted"], IGNORED)
        made: Batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels.contiguous()}
        if "documents" in batch:
            made["position_ids"] = positions_in(batch["documents"])
        return {**made, **{name: batch[name] for name in ("bytes", "samples", "numbers") if name in batch}}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean of nats over the tokens that count, with the weighted balance loss of a mixture of experts."""
        count, weight = (batch["labels"] != IGNORED).sum(), self._sections.model.balance_loss
        if not weight:
            return Loss.of(model(**_inputs(batch)), count)
        nats, balance = model(**_inputs(batch), balance=True)
        return Loss.of(nats + weight * balance, count, {"balance_loss": (balance.detach(), count)})

    # Scores -----------------------------------------------------------------------------------------------------------

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return nats a token, and bits a byte of text where the bytes are known."""
        nats = model(**_inputs(batch), by_row=True).double() * valid
        tokens = (batch["labels"] != IGNORED).sum(1).double() * valid
        sums = {"loss": (nats.sum(), tokens.sum())}
        if "bytes" in batch:
            sums["bits_per_byte"] = nats.sum() / math.log(2), (batch["bytes"].double() * valid).sum()
        return Scores(sums)

    def reduce_metrics(self, sums: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:  # noqa: ARG002
        """Return the scores, perplexity among them. Raises DataError if no token counts."""
        if not sums["loss"][1]:
            raise DataError("no token of this text counts, so there is no score: check that it contains answers")
        scores = {name: (total / count).item() for name, (total, count) in sums.items() if count}
        return {**scores, "perplexity": math.exp(min(scores["loss"], 700.0))}, {}

    def generate_samples(self, model: Callable[..., Any], batch: Batch) -> list[tuple[str, str]]:
        """Return the beginnings of rows and the model's continuations; nothing for a large model."""
        if self._parameters > generate.LARGEST_SAMPLED:
            return []
        tokenizer = store.stored_tokenizer(self._sections.data.first_folder)
        return [] if tokenizer is None else generate.samples(model, batch["input_ids"], tokenizer)

    def preview(self, batch: Batch, limit: int) -> tuple[str, str]:
        """Return the text of rows, or their tokens where the tokenizer is not stored with the text."""
        tokenizer, rows = store.stored_tokenizer(self._sections.data.first_folder), batch["input_ids"][:limit].tolist()
        return "rows", "\n".join(tokenizer.decode(row) if tokenizer else " ".join(map(str, row)) for row in rows)

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:  # noqa: ARG002
        """Raise RecipeError: files are not what a language model continues."""
        raise RecipeError("this is the run of a language model, which continues a text: samerun generate RUN TEXT")

    def export_files(self, metadata: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the files with which transformers loads a folder with the weights."""
        return configuration.export_files(self._sections, metadata, info)

    def adapters(self, model: nn.Module) -> Adapters | None:
        """Return how adapters of low rank are added to the weights, where the recipe has some."""
        return networks.adapters(model, self._sections.model) if self._sections.model.lora_rank else None

    def file_names(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, FileParts]:
        """Return the names and parts of experts in transformers' files."""
        return networks.file_names(model, shapes)

    def load_folder(self, folder: Path, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the network of a folder of transformers, which is the recipe's `model.path`, with its weights."""
        return networks.build(self._sections.model, metadata, folder=folder)

    def check_folder(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        """Raise DataError if the text is of another tokenizer than a folder of transformers, RecipeError if its network sees
        later tokens."""
        configuration.check_tokenizer(folder, metadata["tokenizer"])
        self._check(to_train=False)

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:  # noqa: ARG002
        """Return two rows without data. All of attention is counted, what the causal mask hides too.

        So do Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B), by whose figures MFU is compared.
        """
        rows = torch.empty(2, metadata["sequence_length"], dtype=torch.int64, device="meta")
        return {"input_ids": rows, "labels": torch.empty_like(rows), "samples": torch.arange(2, device="meta")}


def positions_in(documents: Tensor) -> Tensor:
    """Return the place of each token in its document, int64 [B, S], from 0; `documents` [B, S] are the documents' numbers."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(1).values


def _inputs(batch: Batch) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids") if name in batch}


task = CausalLM
