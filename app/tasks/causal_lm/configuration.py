"""transformers' configuration of a network, from the recipe's keys or a config.json, and the files next to its weights.

transformers is imported when a configuration is made, and no more of it than that architecture needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError, RecipeError, did_you_mean
from app.files import hub, other_libraries, text_files
from app.files.text_files import parsed
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.tokenizers import Bytes, Transformers
from app.tasks.causal_lm.sections import NAMES, ModelRecipe, Sections

OTHER_NAMES = {"intermediate_size": ("n_inner", "ffn_dim")}
"""Names missing in the `attribute_map` of configurations: gpt2, opt."""
_GENERATION = "generation_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Every tokenizer has at least one of these files."""
_NO_PART = ("transformers_version", "_name_or_path")
_DROPOUT = (
    "resid_pdrop", "embd_pdrop", "emb_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout", "residual_dropout",
    "embedding_dropout",
)  # fmt: skip
_NO_DROPOUT = (
    "attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "activation_dropout", "layerdrop",
)  # fmt: skip
"""Dropout inside attention is not a module, and each process skips other layers."""


def network_config(recipe: ModelRecipe, *, vocab_size: int | None = None, sequence_length: int | None = None) -> Any:
    """Return transformers' configuration of the network, for text with this number of tokens and rows of this length.

    None: not known, as before the text is opened. Raises RecipeError for names and numbers that are impossible.
    """
    config = _from_folder(recipe) if recipe.path is not None else _from_sizes(recipe, vocab_size, sequence_length)
    problems, most = [], positions(config)
    if vocab_size and config.vocab_size < vocab_size:
        problems.append(f"model.vocab_size is {config.vocab_size}, and the tokenizer has {vocab_size} tokens: raise it")
    if sequence_length and most and sequence_length > most:
        problems.append(f"rows have {sequence_length} tokens, more than model.positions, {most}: lower data.sequence_length")
    if recipe.dropout and not any(hasattr(config, name) for name in _DROPOUT):
        problems.append(f"model.dropout is {recipe.dropout}, and {config.model_type} has no such dropout: set it to 0")
    if problems:
        raise RecipeError(*problems)
    rates = dict.fromkeys(_DROPOUT, recipe.dropout)
    rates |= {name: (recipe.settings or {}).get(name, 0.0) for name in _NO_DROPOUT}
    for name, rate in rates.items():
        if hasattr(config, name):
            setattr(config, name, rate)
    return config


def positions(config: Any) -> int | None:
    """Return how many tokens of a row the model takes at most; None: any number."""
    most = getattr(config, "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def digest(recipe: ModelRecipe) -> dict[str, str]:
    """Return a digest of the config.json in model.path, by the name of this input; nothing without one. Raises RecipeError.

    It is a digest of the values: their layout, and the version of transformers that wrote them, are no part of the network.
    """
    if recipe.path is None:
        return {}
    values = {key: value for key, value in _read(recipe).items() if key not in _NO_PART}
    return {"config.json of model.path": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def _read(recipe: ModelRecipe) -> dict[str, Any]:
    path = recipe.path or ""
    is_named = hub.parsed(path) is not None
    folder = hub.folder("model.path", path, weights=False) if is_named else Path(text_files.filled_in("model.path", path))
    try:
        return dict(parsed((folder / "config.json").read_bytes()).items())
    except FileNotFoundError as error:
        raise RecipeError(f"model.path is {path}: config.json is missing ({error}): give a transformers folder") from error
    except (OSError, ValueError, AttributeError) as error:
        raise RecipeError(f"model.path is {path}: its config.json is not one of transformers: {error!r}") from error


def _from_folder(recipe: ModelRecipe) -> Any:
    values = _read(recipe)
    model_type = values.pop("model_type", None)
    where = f"model_type in the config.json of model.path={recipe.path}"
    kind = _config_class(model_type, where, needs_code="auto_map" in values)
    names = {*values, *(field.name for field in dataclasses.fields(kind))}
    return _made(kind, {**values, **_settings(recipe, names)})


def _from_sizes(recipe: ModelRecipe, vocab_size: int | None, sequence_length: int | None) -> Any:
    architecture = recipe.architecture or "gpt2"
    kind = _config_class(architecture, "model.architecture", needs_code=False)
    names = {field.name for field in dataclasses.fields(kind)}
    default = kind()
    values: dict[str, Any] = {}
    for key, value in {"vocab_size": vocab_size, "positions": sequence_length, **recipe.chosen}.items():
        common = NAMES[key]
        own = next((it for it in (kind.attribute_map.get(common, common), *OTHER_NAMES.get(key, ())) if it in names), None)
        if own is None and key in recipe.chosen:
            raise RecipeError(f"model.{key} is {value}, and {architecture} has no such setting: remove it")
        if own is not None and value is not None:
            values[own] = value
    if recipe.hidden_size and not recipe.intermediate_size and isinstance(getattr(default, "intermediate_size", None), int):
        values["intermediate_size"] = -(-recipe.hidden_size * default.intermediate_size // default.hidden_size // 8) * 8
    if recipe.heads and not recipe.key_value_heads and "num_key_value_heads" in names:
        values["num_key_value_heads"] = recipe.heads
    if recipe.hidden_size and recipe.heads and "head_dim" in names:
        values["head_dim"] = recipe.hidden_size // recipe.heads
    # The defaults of the class belong to another vocabulary; as padding, a token would get no gradient.
    values |= {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in names}
    return _made(kind, {**values, **_settings(recipe, names)})


def _settings(recipe: ModelRecipe, names: Collection[str]) -> Mapping[str, Any]:
    """Return model.settings. Raises RecipeError for a name that is not among `names`."""
    known = {*names, *(("rope_theta", "rope_scaling") if "rope_parameters" in names else ())}
    settings = recipe.settings or {}
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"there is {', '.join(sorted(known))}")
            raise RecipeError(f"model.settings has {name}, which this architecture does not have; {hint}")
    return settings


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except Exception as error:  # transformers raises of its own
        why = str(error).splitlines()[-1].strip()
        raise RecipeError(f"model.*: transformers refuses this {kind.model_type}: {why}") from error


def _config_class(model_type: str | None, where: str, *, needs_code: bool) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as HAVE

    if model_type in HAVE and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    hint = other_libraries.NEEDS_CODE
    if not needs_code:
        hint = did_you_mean(str(model_type), HAVE, otherwise="for example gpt2, llama, qwen3, mistral or gemma")
    raise RecipeError(f"{where} is {model_type}: transformers has no such causal language model; {hint}")


def export_files(sections: Sections, facts: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files next to the weights, by their names; as `app.task.Task.export_files`."""
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tokenizer, recipe = facts["tokenizer"], info["recipe"]
    config = network_config(sections.model, vocab_size=facts["vocab_size"], sequence_length=facts["sequence_length"])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = recipe["train.dtype"]
    config.eos_token_id = _end_tokens(getattr(config, "eos_token_id", None), tokenizer.get("eos_id"))
    if getattr(config, "bos_token_id", None) is None:
        config.bos_token_id = tokenizer.get("bos_id")
    generation = GenerationConfig.from_model_config(config).to_json_string()
    for key, place in (("train.init_from", recipe["train.init_from"] or ""), ("model.path", sections.model.path or "")):
        # Settings that came with the base weights are kept.
        try:
            folder = hub.folder(key, place, weights=False) if hub.parsed(place) else Path(place).expanduser()
        except DataError as error:  # of a run that was resumed on another machine
            sys.stderr.write(f"note: the settings in {_GENERATION} are not kept: {error}\n")
            continue
        if place and (file := folder / _GENERATION).is_file():
            base = json.loads(file.read_bytes())
            ends = _end_tokens(base.get("eos_token_id"), tokenizer.get("eos_id"))
            generation = json.dumps({**base, "eos_token_id": ends}, indent=2)
    files = tokenizer_files(sections.data.first_folder, tokenizer)
    return {**files, _GENERATION: generation.encode(), "config.json": config.to_json_string().encode()}


def tokenizer_files(data_path: str | None, tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the tokenizer of a text, which are in its token folder; none for a text without one.

    Raises DataError if the folder no longer has this tokenizer.
    """
    if tokenizer["kind"] == "bytes":
        return Bytes().files()
    if data_path is None or not tokenizer.get("digest"):
        return {}
    folder = Path(text_files.filled_in("data.path", data_path))
    stored = store.about(folder)["tokenizer"] if folder.exists() else {}
    if stored.get("digest") != tokenizer["digest"]:
        raise DataError(
            f"{folder} does not contain the tokenizer that the model was trained with ({tokenizer['digest']}): put it back, or "
            "export only the weights (--out FILE.safetensors)"
        )
    return {name: (folder / store.TOKENIZER / name).read_bytes() for name in stored["files"]}


def _end_tokens(stated: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """Return the tokens that end a text: the tokenizer's, which ended the run's texts, before the base model's."""
    before = [stated] if isinstance(stated, int) else stated or []
    if end is None or end in before:
        return stated
    return [end, *before] if before else end


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has a tokenizer. transformers makes one up if there is none."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_tokenizer(folder: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raise DataError if a text was tokenized with another tokenizer than a folder has; print a note if that is unknown."""
    digest = tokenizer.get("digest")
    if not digest or not has_tokenizer(folder):
        where = folder if digest else "the text"
        sys.stderr.write(f"note: {where} has no tokenizer: it is assumed that the tokens are those of the model\n")
        return
    if tokenizer["kind"] == "bytes":
        files = {folder / name: content for name, content in Bytes().files().items()}
        is_same = digest == Bytes().about["digest"] and all(
            file.is_file() and file.read_bytes() == content for file, content in files.items()
        )
    else:
        is_same = Transformers(str(folder)).about["digest"] == digest
    if not is_same:
        raise DataError(
            f"the text was tokenized with another tokenizer ({digest}) than the one in {folder}: tokenize it "
            "with that one (samerun data tokenize)"
        )
