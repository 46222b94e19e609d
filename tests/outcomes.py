"""What came out of a run, as its folder says, and what of it differs between two runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from processes import read, read_lines

NUMBERS = ("loss", "accuracy", "grad_norm", "samples_seen", "epoch", "skipped_steps")
"""What is compared of a line of metrics.jsonl, beside the learning rate."""
Facts = dict[str, dict[str, Any]]
"""What came out of a run: what is compared, such as the losses, and each of its values by name."""


def facts(run_dir: Path) -> Facts:
    """What a run's files say. Raises AssertionError if they say too little to be compared."""
    lines, ledger = read_lines(run_dir / "metrics.jsonl"), read_lines(run_dir / "ledger.jsonl")
    fed = [line for line in ledger if line["event"] == "steps"]
    digests = {f"step {line['first'] + at}": digest for line in fed for at, digest in enumerate(line["digests"])}
    evaluated = dict(numbers("", read(run_dir / "result.json")))
    for line in read_lines(run_dir / "evaluations.jsonl"):
        evaluated |= numbers(f"step {line['step']} ", line)
    assert lines, f"{run_dir}: no losses"
    assert digests, f"{run_dir}: no samples"
    scored = [name for name in evaluated if name.startswith(("validation_", "test_")) and not name.endswith("_samples")]
    assert scored, f"{run_dir}: no evaluation"
    return {
        "losses": {f"{name} at step {line['step']}": line.get(name) for line in lines for name in NUMBERS},
        "rates": {f"step {line['step']}": line["learning_rate"] for line in lines},
        "samples": digests,
        "evaluations": evaluated,
    }


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Each number of a JSON value that is no time, with its name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "time" and not key.endswith("_s"):
                yield from numbers(f"{name}{key} ", inner)
    elif isinstance(value, (int, float)):
        yield name.strip(), value


def tensors(path: Path) -> dict[str, Any]:
    """Type, shape and digest of each tensor of a safetensors file (github.com/huggingface/safetensors, "Format")."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    assert header, f"{path} has no tensors"
    return {
        name: (it["dtype"], it["shape"], hashlib.sha256(content[slice(*(start + at for at in it["data_offsets"]))]).hexdigest())
        for name, it in header.items()
    }


def differences(base: Mapping[str, Any], head: Mapping[str, Any], *, tolerance: float) -> list[str]:
    """A line for each value that differs; with a tolerance of 0 numbers must be equal, NaN to NaN."""
    found = []
    for name in dict.fromkeys((*base, *head)):
        one, other = (side.get(name, "(none)") for side in (base, head))
        if not _agree(one, other, tolerance):
            found.append(f"{name}: base {one}, here {other}")
    return found


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, float) or not isinstance(other, float):
        return bool(one == other)
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(1.0, abs(one))
