"""What tokenizing costs, beside `datasets.map`: `python -m benchmarks.tokenizing`.

Both read the same JSON lines (the paragraphs of the text that comes with the package, 20 MB) and write the tokens to a disk,
with a byte-level BPE of 8,192 tokens trained on that text. They take turns in rounds, each in a process of its own with one
worker. What is counted is the CPU time from the opened tokenizer to the written tokens. Nothing is left behind.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.tasks.causal_lm.data import embedded, texts
from app.tasks.causal_lm.data.store import about
from app.tasks.causal_lm.data.tokenizers import Transformers, open_tokenizer
from app.tasks.causal_lm.data_tools.tokenizing import Job, tokenize

_BYTES, _ROUNDS, _VOCABULARY = 20_000_000, 5, 8192
_BATCH = 1000  # rows that `map` gives to the tokenizer at once: its own default


def main(argv: list[str]) -> int:
    """Print what was measured, as docs/language-model-checks.md has it; with arguments, measure one of them."""
    if argv:
        sys.stdout.write(json.dumps(_CASES[argv[0]](Path(argv[1]))) + "\n")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = _write(folder)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in _CASES}
        for _ in range(_ROUNDS):
            for name in _CASES:
                # With threads of its own a tokenizer takes as many cores as there are.
                command = ["env", "TOKENIZERS_PARALLELISM=false", f"HF_DATASETS_CACHE={folder / 'cache'}", sys.executable]
                ended = subprocess.run(
                    [*command, "-m", "benchmarks.tokenizing", name, temporary], check=True, capture_output=True
                )
                found[name].append(json.loads(ended.stdout.splitlines()[-1]))
    for name, measured in found.items():
        speeds = [size / 1e6 / one["cpu_s"] for one in measured]
        said = f"{statistics.median(speeds):.2f} MB/s per core ({min(speeds):.2f}-{max(speeds):.2f})"
        sys.stdout.write(f"{name}: {said}, {measured[0]['tokens']:,.0f} tokens\n")
    return 0


def _write(folder: Path) -> int:
    """Write texts and tokenizer; return the bytes of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chapters = [chapter.decode() for chapter in embedded.documents()["train"]]
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    backend.train_from_iterator(chapters, trainer)
    backend.save(str(folder / "tokenizer.json"))
    paragraphs = [part for chapter in chapters for part in chapter.split("\n\n") if part.strip()]
    written = 0
    with (folder / "texts.jsonl").open("w") as file:
        while written < _BYTES:
            for text in paragraphs:
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
    return written


def _ours(folder: Path) -> dict[str, float]:
    out = folder / f"out{time.time_ns()}"
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    start_s = time.process_time()
    tokenize(out, Job(tokenizer=tokenizer, sources={"train": texts.find([str(folder / "texts.jsonl")], texts.Asked())}), 1)
    spent_s = time.process_time() - start_s
    return {"cpu_s": spent_s, "tokens": about(out)["splits"]["train"]["tokens"]}


def _map(folder: Path) -> dict[str, float]:
    from datasets import load_dataset

    opened = open_tokenizer(str(folder / "tokenizer.json"))
    assert isinstance(opened, Transformers)
    library, end = opened.tokenizer, [opened.tokenizer.eos_token_id]

    def encoded(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = library(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"input_ids": [ids + end for ids in found]}

    start_s = time.process_time()
    rows = load_dataset(
        "json", data_files=str(folder / "texts.jsonl"), split="train", cache_dir=str(folder / f"{time.time_ns()}")
    )
    written = rows.map(encoded, batched=True, batch_size=_BATCH, remove_columns=["text"])
    spent_s = time.process_time() - start_s
    return {"cpu_s": spent_s, "tokens": sum(len(row["input_ids"]) for row in written)}


_CASES: dict[str, Callable[[Path], dict[str, float]]] = {"samerun data tokenize": _ours, "datasets.map": _map}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
