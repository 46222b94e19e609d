"""transformers' configuration of a network: of the recipe's keys, or of a config.json.

transformers is imported when it is asked for, and no more of it than that architecture needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError, RecipeError, did_you_mean
from app.files import other_libraries, paths
from app.files.lines import parsed
from app.tasks.causal_lm.sections import ModelRecipe

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
OTHER_NAMES = {"intermediate_size": ("n_inner", "ffn_dim")}
"""Names missing in that map: gpt2, opt."""
_NO_PART = ("transformers_version", "_name_or_path")
_DROPOUT = (
    "resid_pdrop", "embd_pdrop", "emb_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout", "residual_dropout",
    "embedding_dropout",
)  # fmt: skip
_NO_DROPOUT = (
    "attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "activation_dropout", "layerdrop",
)  # fmt: skip
"""Dropout inside attention is not a module, and each process skips other layers."""


def config_of(recipe: ModelRecipe, *, vocab_size: int | None, sequence_length: int | None) -> Any:
    """Return transformers' configuration of the network, for text with so many tokens and rows of that length.

    None: not known, as before the text is opened. Raises RecipeError for names and numbers that cannot be.
    """
    config = _of_folder(recipe) if recipe.path is not None else _of_sizes(recipe, vocab_size, sequence_length)
    _check(config, recipe, vocab_size=vocab_size, sequence_length=sequence_length)
    for name in _DROPOUT:
        if hasattr(config, name):
            setattr(config, name, recipe.dropout)
    for name in _NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, (recipe.settings or {}).get(name, 0.0))
    return config


def positions_of(recipe: ModelRecipe) -> int | None:
    """Return how many tokens of a row the model takes at most; None: any number. Raises RecipeError."""
    return _positions(config_of(recipe, vocab_size=None, sequence_length=None))


def digest(recipe: ModelRecipe) -> dict[str, str]:
    """Return a digest of the config.json that model.path names, by what it is called; nothing without one. Raises RecipeError.

    Of its values: how they are laid out, and the version of transformers that wrote them, is no part of the network.
    """
    if recipe.path is None:
        return {}
    values = {key: value for key, value in _read(recipe).items() if key not in _NO_PART}
    return {"config.json of model.path": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def _of_folder(recipe: ModelRecipe) -> Any:
    values = _read(recipe)
    try:
        kind = _class_of_config(values.pop("model_type"))
    except (KeyError, AttributeError) as error:
        raise _is_none_of_transformers(recipe, error) from error
    except RecipeError as error:
        if "auto_map" in values:
            raise RecipeError(f"model.path is {recipe.path}: {other_libraries.NEEDS_CODE}") from error
        raise
    names = {*values, *(field.name for field in dataclasses.fields(kind))}
    return _made(kind, {**values, **_changed(recipe, names)})


def _read(recipe: ModelRecipe) -> dict[str, Any]:
    path = recipe.path or ""
    folder = path if recipe.is_named else paths.filled_in("model.path", path)
    try:
        if recipe.is_named:
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(folder, "config.json", revision=recipe.revision, local_files_only=True))
        else:
            file = Path(folder) / "config.json"
        return dict(parsed(file.read_bytes()).items())
    except FileNotFoundError as error:
        hint = "set model.download=true to download it once" if recipe.is_named else "give a transformers folder"
        raise RecipeError(f"model.path is {path}: config.json is missing ({error}): {hint}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise _is_none_of_transformers(recipe, error) from error


def _is_none_of_transformers(recipe: ModelRecipe, error: Exception) -> RecipeError:
    return RecipeError(f"model.path is {recipe.path}: its config.json is not one of transformers: {error!r}")


def download(recipe: ModelRecipe) -> None:
    """Fetch the config.json of a name of the hub into this machine's cache, if that is allowed. Raises DataError."""
    if not (recipe.is_named and recipe.download):
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(recipe.path or "", "config.json", revision=recipe.revision)
    except Exception as error:  # whatever the network says
        raise DataError(f"the config.json of {recipe.path} cannot be downloaded ({error}): check the network") from error


def _of_sizes(recipe: ModelRecipe, vocab_size: int | None, sequence_length: int | None) -> Any:
    kind = _class_of_config(recipe.architecture or "gpt2")
    names = {field.name for field in dataclasses.fields(kind)}
    default = kind()
    values: dict[str, Any] = {}
    chosen = {"vocab_size": vocab_size, "positions": sequence_length, **recipe.chosen}
    for key, value in chosen.items():
        common = NAMES[key]
        own = next(
            (name for name in (kind.attribute_map.get(common, common), *OTHER_NAMES.get(key, ())) if name in names), None
        )
        if own is None and key in recipe.chosen:
            raise RecipeError(f"model.{key} is {value}, and {recipe.architecture or 'gpt2'} has no such setting: remove it")
        if own is not None and value is not None:
            values[own] = value
    if recipe.hidden_size and not recipe.intermediate_size and isinstance(getattr(default, "intermediate_size", None), int):
        values["intermediate_size"] = -(-recipe.hidden_size * default.intermediate_size // default.hidden_size // 8) * 8
    if recipe.heads and not recipe.key_value_heads and "num_key_value_heads" in names:
        values["num_key_value_heads"] = recipe.heads
    if recipe.hidden_size and recipe.heads and "head_dim" in names:
        values["head_dim"] = recipe.hidden_size // recipe.heads
    # Those of the class are of another vocabulary; as padding, a token would get no gradient.
    values |= {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in names}
    return _made(kind, {**values, **_changed(recipe, names)})


def _changed(recipe: ModelRecipe, names: Collection[str]) -> Mapping[str, Any]:
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


def _class_of_config(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as HAVE

    if model_type not in HAVE or model_type not in CONFIG_MAPPING:
        hint = did_you_mean(model_type, HAVE, otherwise="for example gpt2, llama, qwen3, mistral or gemma")
        raise RecipeError(f"model.architecture is {model_type}: transformers has no such causal language model; {hint}")
    return CONFIG_MAPPING[model_type]


def _positions(config: Any) -> int | None:
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def _check(config: Any, recipe: ModelRecipe, *, vocab_size: int | None, sequence_length: int | None) -> None:
    problems, most = [], _positions(config)
    if vocab_size and config.vocab_size < vocab_size:
        problems.append(f"model.vocab_size is {config.vocab_size}, and the tokenizer has {vocab_size} tokens: raise it")
    if sequence_length and most and sequence_length > most:
        problems.append(
            f"a row has {sequence_length} tokens, and the model takes at most {most} (model.positions): lower "
            "data.sequence_length"
        )
    if recipe.dropout and not any(hasattr(config, name) for name in _DROPOUT):
        problems.append(f"model.dropout is {recipe.dropout}, and {config.model_type} has no such dropout: set it to 0")
    if problems:
        raise RecipeError(*problems)
