"""Folders of transformers: the files that belong next to `model.safetensors`, and whether a tokenizer suits a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError
from app.files import paths
from app.tasks.causal_lm import configuration
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.tokenizers import Bytes, Transformers
from app.tasks.causal_lm.sections import Sections

_GENERATION = "generation_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Every tokenizer has at least one of these files."""


def beside(sections: Sections, facts: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files beside the weights, by their names; as `app.task.Task.export_files`."""
    config = _config(sections, facts, dtype=told["recipe"]["train.dtype"])
    return {
        **tokenizer_files(sections.data.path, facts["tokenizer"]),
        _GENERATION: _generation(
            config, [sections.model.path, told["recipe"]["train.init_from"]], facts["tokenizer"].get("eos_id")
        ),
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
    config.eos_token_id = _ends(getattr(config, "eos_token_id", None), tokenizer.get("eos_id"))
    if getattr(config, "bos_token_id", None) is None:
        config.bos_token_id = tokenizer.get("bos_id")
    return config


def _ends(said: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """Return the tokens that end a text: that of the tokenizer, which ended the run's texts, before those of the base."""
    before = [said] if isinstance(said, int) else said or []
    if end is None or end in before:
        return said
    return [end, *before] if before else end


def _generation(config: Any, folders: list[str | None], end: int | None) -> bytes:
    """The settings of generation: those that came with what the run began with, or transformers' own for the model."""
    from transformers import GenerationConfig

    for folder in folders:
        if folder and (file := Path(folder).expanduser() / _GENERATION).is_file():
            came = json.loads(file.read_bytes())
            return json.dumps({**came, "eos_token_id": _ends(came.get("eos_token_id"), end)}, indent=2).encode()
    return bytes(GenerationConfig.from_model_config(config).to_json_string().encode())


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer. transformers makes one up if there is none."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_tokenizer(folder: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raise DataError if a text was tokenized with another tokenizer than a folder has; print a note if that is unknown."""
    digest = tokenizer.get("digest")
    if not digest or not has_tokenizer(folder):
        where = folder if digest else "the text"
        sys.stderr.write(f"note: {where} has no tokenizer: it is assumed that the tokens are those of the model\n")
        return
    if tokenizer["kind"] == "bytes":
        is_there = all(
            (folder / name).is_file() and (folder / name).read_bytes() == content for name, content in Bytes().files().items()
        )
        is_same = is_there and digest == Bytes().about["digest"]
    else:
        is_same = Transformers.load(str(folder), None).about["digest"] == digest
    if not is_same:
        raise DataError(
            f"the text was tokenized with another tokenizer ({digest}) than the one in {folder}: tokenize it "
            "with that one (samerun data tokenize)"
        )
