"""Folders of transformers that Samerun did not write: whether text has the tokens that they know."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import DataError
from app.tasks.causal_lm.data.tokenizers import Bytes, Transformers

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Every tokenizer has at least one of these files."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in a folder. transformers makes one up where there is none."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def check_tokenizer(folder: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raise DataError if the tokenizer of a text is another than that of a folder; say if that cannot be known."""
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
