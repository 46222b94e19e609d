"""What `samerun data tokenize` says at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.tasks.causal_lm.data_tools.tokenizing import SPLITS, Made


def as_text(out: Path, about: Mapping[str, Any], made: Made, *, workers: int, elapsed_s: float) -> str:
    """Return the numbers of each split, what was left out, and what it took."""
    lines = [f"written to {out}; in a recipe, set data.path={out}", *table_of(about)]
    for what, count in sorted(made.left_out.items()):
        kept = "" if what.endswith((", kept", ", truncated there")) else "left out: "
        lines.append(f"{kept}{count:,} x {what}")
    if made.not_read:
        lines.append(
            f"not read: {len(made.not_read):,} files with an unknown suffix, such as {made.not_read[0]} (--format reads all)"
        )
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    took = f"{elapsed_s:.1f} s by {workers} process{'es' if workers > 1 else ''}"
    if made.kept_parts:
        took += f"; {made.kept_parts} of {made.parts} parts were already done"
    speed = f"{made.megabytes / made.cpu_s:.2f} MB/s per core, " if made.cpu_s and made.megabytes else ""
    lines.append(f"{_size(size)} on disk; {speed}{took}")
    return "\n".join(lines) + "\n"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.1f} kB"


def table_of(about: Mapping[str, Any]) -> list[str]:
    """Return what tokens.json says of each split, as lines."""
    head = ["", "documents", "tokens", "bytes", "bytes per token", *(["rows"] if about["packed"] else [])]
    rows = [head]
    for split in SPLITS:
        if said := about["splits"].get(split):
            numbers = [f"{said[name]:,}" for name in ("documents", "tokens", "bytes")]
            rows.append(
                [split, *numbers, f"{said['bytes'] / said['tokens']:.3f}", *([f"{said['rows']:,}"] if "rows" in said else [])]
            )
    return in_columns(rows)


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if place else '<'}{width}}" for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
