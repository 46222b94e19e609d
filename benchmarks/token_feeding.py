"""What rows of tokens cost: `python -m benchmarks.token_feeding`.

Tokens a second that one core looks up, in the order of a training run, of 64 rows of 1024 tokens: concatenated and packed, with
and without document masks, with a mask of answers; and, beside it, what opening costs at 2 million and 2 billion tokens.
Made-up tokens with documents of a text's lengths (log-normal, median 400), in a temporary folder; nothing is left behind.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from app.data.order import TrainBatches
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.store import Tokens, about, blocks_digest, open_split
from app.tasks.causal_lm.data.writing import writing

_TOKENS, _LENGTH, _BATCH, _ROUNDS, _ROUND_S = 1 << 26, 1024, 64, 5, 1.0
_TOKENIZER = {"kind": "made up", "vocab_size": 50257, "digest": "none"}


def main() -> int:
    """Print what was measured, as docs/language-model-checks.md has it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plain = _written(folder / "plain", packed=False, answers=False)
        packed = _written(folder / "packed", packed=True, answers=False)
        answers = _written(folder / "answers", packed=False, answers=True)
        cases = {
            "concatenated": Rows(plain, _LENGTH, training=True),
            "concatenated, document masks": Rows(plain, _LENGTH, training=True, document_masks=True),
            "concatenated, answers alone count": Rows(answers, _LENGTH, training=True),
            "packed": Rows(packed, None),
            "packed, document masks": Rows(packed, None, document_masks=True),
        }
        orders = {name: _order(len(rows)) for name, rows in cases.items()}
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(_ROUNDS):
            for name, rows in cases.items():
                speeds[name].append(_tokens_per_s(rows, orders[name]))
        for name, found in speeds.items():
            _say(f"{name}: {statistics.median(found) / 1e6:.0f} M tokens/s ({min(found) / 1e6:.0f}-{max(found) / 1e6:.0f})")
        filled = int(packed.counts.sum()) if packed.counts is not None else 0
        _say(f"packed rows are {100 * filled / (len(cases['packed']) * _LENGTH):.2f} % targets")
        for tokens in (2_000_000, 2_000_000_000):
            _say_opening(_sparse(folder / str(tokens), tokens), tokens)
    return 0


def _written(folder: Path, *, packed: bool, answers: bool) -> Tokens:
    random = np.random.default_rng(0)
    length = _LENGTH if packed else None
    with writing(folder, _TOKENIZER, {}, token_bytes=np.full(50257, 4), sequence_length=length, answers=answers) as writer:
        written = 0
        while written < _TOKENS:
            lengths = np.clip(random.lognormal(6, 1.2, 10_000).astype(np.int64), 1, 200_000)
            tokens = random.integers(0, 50257, lengths.sum()).astype(np.uint16)
            writer.append("train", tokens, lengths, counted=tokens % 2 == 0 if answers else None)
            written += len(tokens)
    split = open_split(folder, "train")
    assert split is not None
    return split


def _order(size: int) -> Iterator[np.ndarray]:
    batches = TrainBatches(size=size, seed=7, global_batch_size=_BATCH, micro_batches_per_step=1, first_step=0, last_step=10**6)
    return (numbers % size for numbers in batches)


def _tokens_per_s(rows: Rows, order: Iterator[np.ndarray]) -> float:
    start, number = time.process_time(), 0
    while time.process_time() - start < _ROUND_S:
        rows.fetch(next(order), None)
        number += _BATCH * _LENGTH
    return number / (time.process_time() - start)


def _sparse(folder: Path, tokens: int) -> Path:
    """Return a folder of so many tokens, all 0, that takes no room on the disk."""
    with writing(folder, _TOKENIZER, {}, token_bytes=np.ones(50257)) as writer:
        writer.append("train", np.zeros(8, np.uint16), np.array([8]))
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(2 * tokens)
    np.array([0, tokens], "<u8").tofile(folder / "train.documents")
    said = about(folder)
    entry = said["splits"]["train"]
    entry["tokens"] = tokens
    for name in ("train.bin", "train.documents"):
        path = folder / name
        entry["files"][name] = {"bytes": path.stat().st_size, "sha256": "", "blocks": blocks_digest(path)}
    (folder / "tokens.json").write_text(json.dumps(said))
    return folder


def _say_opening(folder: Path, tokens: int) -> None:
    start = time.process_time()
    split = open_split(folder, "train")
    assert split is not None
    rows = Rows(split, _LENGTH, training=True)
    rows.fetch(next(_order(len(rows))), None)
    _say(f"{tokens:,} tokens, opened to a first batch: {1000 * (time.process_time() - start):.0f} ms of CPU time")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
