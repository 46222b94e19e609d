"""nanoGPT's files, read in place: train.bin and val.bin, numbers of 16 bits without a header (its data/*/prepare.py).

They do not say where documents begin, nor how many bytes of text a token stands for: there are no document masks, and no bits
per byte. meta.pkl is not opened, for a pickle may hold any program: the vocabulary is that of the model, where the recipe says
it (`model.vocab_size`, or the config.json of `model.path`), or else the largest token of both files and one.

The fingerprint is made of the size and of 256 blocks of each file, for there is no digest of the whole.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.tasks.causal_lm.data.store import ABOUT, Tokens, blocks_digest

FILES = {"train": "train.bin", "validation": "val.bin"}
_BLOCKS = 256
_MOST_BYTES = 1 << 30
"""In larger files the largest token is not searched for: every process would have to read the whole file."""
_LLM_C = (20240520, 20240801)
"""The first number of llm.c's files, which have a header."""


def is_nanogpt(folder: Path) -> bool:
    """Return whether a folder has nanoGPT's files, and is no token folder."""
    return (folder / FILES["train"]).is_file() and not (folder / ABOUT).exists()


def open_nanogpt(folder: Path, split: str, vocab_size: int | None = None) -> Tokens | None:
    """Return a split of a nanoGPT folder, mapped; None: it has none of this name, which test always is.

    Without `vocab_size` there are as many tokens as the files use. Raises DataError if a file is cut, empty or of another kind,
    or too large to look for its largest token.
    """
    path = folder / FILES.get(split, "")
    if split not in FILES or not path.is_file():
        return None
    tokens = _mapped(path)
    said = "up to the largest token" if vocab_size is None else "that of the model"
    size = vocab_size or 1 + max(_largest(folder / name) for name in FILES.values() if (folder / name).is_file())
    tokenizer: dict[str, Any] = {
        "kind": "unknown",
        "name": f"unknown (nanoGPT's files do not record it; vocabulary: {said})",
        "revision": None,
        "digest": None,
        "vocab_size": size,
        "eos_id": None,
        "bos_id": None,
    }
    return Tokens(
        where=str(path),
        tokens=tokens,
        vocab_size=size,
        fingerprint=blocks_digest(path, _BLOCKS),
        tokenizer=tokenizer,
        again=(open_nanogpt, (folder, split, size)),
    )


def _mapped(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(4)
        if size % 2 or size < 4:
            raise DataError(
                f"{path} has {size} bytes, not a whole number of 16-bit tokens: it is truncated, or not a file of nanoGPT"
            )
        if struct.unpack("<i", begin)[0] in _LLM_C:
            raise DataError(
                f"{path} has the header of llm.c, and nanoGPT's files have none: tokenize the texts (samerun data tokenize)"
            )
        return np.asarray(np.memmap(path, "<u2", mode="r"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); correct data.path") from None


def _largest(path: Path) -> int:
    tokens, step = _mapped(path), 1 << 24
    if tokens.nbytes > _MOST_BYTES:
        raise DataError(
            f"{path} does not record the size of its vocabulary, and is too large to search for the largest "
            "token at each start: set model.vocab_size (50257 for GPT-2)"
        )
    return max(int(tokens[at : at + step].max()) for at in range(0, len(tokens), step))
