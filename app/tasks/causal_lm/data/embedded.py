"""The text that comes with the package, as bytes: Moby Dick (moby_dick.md). Nothing is downloaded, nothing is written."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np

from app.tasks.causal_lm.data.store import Tokens
from app.tasks.causal_lm.data.tokenizers import Bytes

_FILE = Path(__file__).with_name("moby_dick.txt.gz")
_BETWEEN = b"\f"


def documents() -> dict[str, list[bytes]]:
    """Return the chapters of each split, in their order, as UTF-8: moby_dick.md says which are where."""
    splits: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    for number, chapter in enumerate(gzip.decompress(_FILE.read_bytes()).split(_BETWEEN)):
        splits[{9: "validation", 19: "test"}.get(number % 20, "train")].append(chapter)
    return splits


def open_embedded(split: str) -> Tokens:
    """Return a split of the embedded text as numbers: train, validation or test."""
    tokenizer, chapters = Bytes(), documents()[split]
    tokens = np.concatenate([tokenizer.document(chapter) for chapter in chapters])
    ends = np.cumsum([len(chapter) + 1 for chapter in chapters])
    return Tokens(
        where=f"the split {split} of the embedded text",
        tokens=tokens,
        vocab_size=tokenizer.about["vocab_size"],
        fingerprint=hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:32],
        tokenizer=tokenizer.about,
        documents=np.concatenate([[0], ends]).astype(np.uint64),
        token_bytes=tokenizer.token_bytes,
        again=(open_embedded, (split,)),
    )
