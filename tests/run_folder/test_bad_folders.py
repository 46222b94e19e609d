"""Folders of runs with files that a crash or a hand has broken: each command says which, and goes on where it can."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from refusals import Refused

PIPE = b"a pipe"
DEEP = b"[" * 3000 + b"\n"
# File, what it holds (None: it is a folder), command, what is said, exit code.
Row = tuple[str, bytes | None, str, str, int]
DAMAGE: list[Row] = [
    ("metrics.jsonl", b"{\n", "report run", "run/metrics.jsonl: a line is damaged or truncated (line 1: it is not JSON", 0),
    ("metrics.jsonl", b"[1]\n", "report run", "(line 1: it is list, not an object), and ignored", 0),
    ("metrics.jsonl", b'{"step": 1e400}\n', "report run", "(line 1: it has no step), and ignored", 0),
    ("metrics.jsonl", None, "report run", "run/metrics.jsonl cannot be read: Is a directory", 0),
    ("metrics.jsonl", b"", "curves run", "run: no training loss is recorded", 0),
    ("metrics.jsonl", b"", "compare run other", "losses cannot be compared", 1),
    ("metrics.jsonl", DEEP, "watch --once run", "(line 1: it is not JSON (maximum recursion", 0),
    ("test_predictions/0.png", b"\x89PNG\r\n", "report run", "0.png is missing or truncated", 0),
    ("run.json", b'{"ranks": 4}', "report run", "The topology, of run.json", 0),
    ("texts.jsonl", b'{"step": 10, "title": 3}\n', "report run", "it has no step, title and text", 0),
    ("ledger.jsonl", b"", "verify run", "does not begin with an attempt of the run: its beginning is missing", 7),
    ("ledger.jsonl", None, "verify run", "run/ledger.jsonl cannot be read: Is a directory", 7),
    ("ledger.jsonl", PIPE, "verify run", "run/ledger.jsonl cannot be read: it is a pipe or a device, not a regular file", 7),
    ("recipe.yaml", b"", "verify run", "recipe.yaml holds NoneType, not keys with values", 7),
    ("recipe.yaml", b"seed: 1\n", "verify run", "lacks seed or train.global_batch_size: it is truncated", 3),
    ("recipe.yaml", b"", "compare run other", "a recipe cannot be read", 1),
    ("run.json", b"[]", "report run", "run/run.json is broken: it holds list, not an object", 0),
    ("result.json", b"{", "report run", "run/result.json cannot be read", 0),
    ("model.json", b"{}", "app.evaluate run", "run/model.json", 7),
    ("model.safetensors", b"PK\3\4" + bytes(99), "app.predict run x.png", "run/model.safetensors", 7),
    ("x.png", b"\x89PNG\r\n\x1a\nbroken", "app.predict run run/x.png", "run/x.png", 6),
]


@pytest.mark.parametrize("row", DAMAGE, ids=[f"{row[2]}: {row[0]} {str(row[1])[:12]}" for row in DAMAGE])
def test_a_broken_file(row: Row, digits_run: Path, refused: Refused, tmp_path: Path) -> None:
    name, content, command, sentence, code = row
    shutil.copytree(digits_run, tmp_path / "run")
    (tmp_path / "other").symlink_to(digits_run)
    file = tmp_path / "run" / name
    file.unlink(missing_ok=True)
    if content is None:
        file.mkdir()
    elif content == PIPE:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    program, *words = command.split() if command.startswith("app.") else ("samerun", *command.split())
    refused([program, *words], sentence, code)
