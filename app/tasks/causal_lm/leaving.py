"""What makes a folder with `model.safetensors` one that transformers loads: configuration and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError
from app.files import paths
from app.tasks.causal_lm import configuration
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.tokenizers import Bytes
from app.tasks.causal_lm.sections import Sections

_GENERATION = "generation_config.json"


def beside(sections: Sections, facts: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files beside the weights, by their names; as `app.task.Task.beside`."""
    config = _config(sections, facts, dtype=told["recipe"]["train.dtype"])
    return {
        **tokenizer_files(sections.data.path, facts["tokenizer"]),
        _GENERATION: _generation(config, [sections.model.path, told["recipe"]["train.init_from"]]),
        "config.json": config.to_json_string().encode(),
    }


def tokenizer_files(data_path: str | None, tokenizer: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the tokenizer of a text, which lie in its token folder; none of a text that has come without.

    Raises DataError if the folder is gone, or of another tokenizer now.
    """
    if tokenizer["kind"] == "bytes":
        return Bytes().files()
    if data_path is None or not tokenizer.get("digest"):
        return {}
    folder = Path(paths.filled_in("data.path", data_path))
    hint = (
        "export only the weights (--out FILE.safetensors), or put it back" if not folder.exists() else "put the other one back"
    )
    said = store.about(folder)["tokenizer"] if folder.exists() else {}
    if said.get("digest") != tokenizer["digest"]:
        raise DataError(
            f"{folder} does not contain the tokenizer that the model was trained with ({tokenizer['digest']}): {hint}"
        )
    return {name: (folder / store.TOKENIZER / name).read_bytes() for name in said["files"]}


def _config(sections: Sections, facts: Mapping[str, Any], *, dtype: str) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = configuration.config_of(sections.model, vocab_size=facts["vocab_size"], sequence_length=facts["sequence_length"])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = dtype
    tokenizer = facts["tokenizer"]
    for name, key in (("eos_token_id", "eos_id"), ("bos_token_id", "bos_id")):
        if getattr(config, name, None) is None:
            setattr(config, name, tokenizer.get(key))
    return config


def _generation(config: Any, folders: list[str | None]) -> bytes:
    """The settings of generation: those that came with what the run began with, or transformers' own for the model."""
    from transformers import GenerationConfig

    for folder in folders:
        if folder and (file := Path(folder).expanduser() / _GENERATION).is_file():
            return file.read_bytes()
    return bytes(GenerationConfig.from_model_config(config).to_json_string().encode())
