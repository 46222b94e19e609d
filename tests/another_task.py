"""A run folder of a task that knows neither pictures nor classes, made of one that does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

PER_SAMPLE = 7
"""Tokens."""


def language(digits_run: Path, folder: Path) -> Path:
    """A copy whose run learns to write: its unit is the token, it is scored in bits per byte, and it has written something."""
    shutil.copytree(digits_run, folder)
    shutil.rmtree(folder / "test_predictions")
    about = {"task": "writer.py", "monitor": ["loss", "min"], "unit": "tokens", "recipe": "<script>alert(1)</script>"}
    _rewrite(folder / "run.json", lambda told: {**told, **about})
    for name in ("metrics.jsonl", "evaluations.jsonl", "result.json"):
        _rewrite(folder / name, lambda values: _in_tokens(_without_classes(values)))
    books = {f"book {number}": number / 2 - 1 for number in range(29)} | {"book 29": None}
    own = {"test_bias": -0.25, "test_book_error": books, "test_month_accuracy": {"May": 0.5}}
    _rewrite(folder / "result.json", lambda result: {**result, **own})
    steps = range(2, 41, 2)
    texts = [
        {"step": step, "title": title, "text": f"{title} {step} <b>" + 40 * " and on"}
        for step in steps
        for title in ("Once", "Twice")
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    return folder


def _in_tokens(values: dict[str, Any]) -> dict[str, Any]:
    told = {
        key.replace("samples_", "tokens_", 1): PER_SAMPLE * value for key, value in values.items() if key.startswith("samples_")
    }
    text = {f"{key.removesuffix('loss')}{name}": value for key, value in values.items() if key.endswith("_loss")
            for name, value in (("bits_per_byte", value * 1.5), ("perplexity", 2 * value))}  # fmt: skip
    return {**values, **told, **text}


def _without_classes(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.endswith("accuracy")}


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(json.dumps(change(json.loads(line))) + "\n" for line in lines))
