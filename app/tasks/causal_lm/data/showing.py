"""Texts that a model generates during training: it continues the beginnings of a few rows, by forward passes alone.

All ranks call the model equally often, with the same tokens, and draw the same numbers: the texts are no strategy's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.files import paths
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.tokenizers import Bytes, Tokenizer, open_tokenizer

BEGINNING, ADDED = 32, 64
"""Most tokens of a row that are given, and most that the model adds: each added token is a forward pass."""
LARGEST = 1_000_000_000
"""Largest model, in parameters, that shows texts: under ZeRO-3 and FSDP2 every pass gathers all parameters."""


def continuations(model: Callable[..., Any], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the beginnings of rows of tokens, int64 [B, S], and what the model draws after them, by torch's generator."""
    given = min(BEGINNING, tokens.shape[1] // 2)
    rows = tokens[:, :given]
    for _ in range(min(ADDED, tokens.shape[1] - given)):
        logits = model(input_ids=rows, use_cache=False).logits[:, -1]
        # On the CPU and in float64: what is drawn then does not depend on a device's way to add up.
        share = logits.double().cpu().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(share, torch.rand(len(rows), 1, dtype=torch.float64) * share[:, -1:], right=True)
        rows = torch.cat([rows, drawn.clamp(max=share.shape[1] - 1).to(rows.device)], dim=1)
    return rows[:, :given], rows[:, given:]


def tokenizer_of(data_path: str | None) -> Tokenizer | None:
    """Return the tokenizer of a text; None: it came without one."""
    if data_path is None:
        return Bytes()
    folder = Path(paths.filled_in("data.path", data_path))
    if store.is_nanogpt(folder):
        return None
    said = store.about(folder)["tokenizer"]
    if said["kind"] == "bytes":
        return Bytes()
    return open_tokenizer(str(folder / store.TOKENIZER)) if said["files"] else None


def texts(model: Callable[..., Any], tokens: Tensor, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the beginning of each row, and the model's continuation until it ends the text."""
    end, found = tokenizer.about["eos_id"], []
    for given, added in zip(*(part.tolist() for part in continuations(model, tokens)), strict=True):
        until = added.index(end) if end in added else len(added)
        found.append((tokenizer.decode(given), tokenizer.decode(added[:until])))
    return found
