"""`samerun data inspect`: what data there is, before anything is trained on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.data.preprocessing import in_order, progress
from app.errors import DataError
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.decoding import opened
from app.tasks.image_classification.data.images import Data, Images, spread
from app.tasks.image_classification.data.open import not_read, open_stored

SAMPLED = 512
"""Pictures examined per split, unless --all is given."""
_PIECE = 16
_ROWS = 64
"""Rows of pixels whose values are counted at a time, each in 8 bytes."""
# Classes that are listed by name.
_LISTED = 20


@dataclass
class Seen:
    """What was seen of some pictures."""

    heights: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    stored_as: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    stored_bytes: int = 0
    means: list[list[float]] = field(default_factory=list)
    """Of each picture, by channel, of pixel values scaled to 0..1."""
    variances: list[list[float]] = field(default_factory=list)
    """Of the same values."""
    unreadable: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Take in what was seen of other pictures."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def inspect(recipe: Recipe, *, everything: bool, processes: int) -> dict[str, Any]:
    """Return what there is to say of a recipe's data, by split: of all pictures with `everything`, else of a sample of them.

    JSON has words for all of it. `processes` read and decode. Raises DataError or RecipeError if the data cannot be opened.
    """
    facts: dict[str, Any] = {"source": recipe.sections.data.source, "path": recipe.sections.data.path}
    data = open_stored(recipe.sections)
    facts["not_read"] = not_read(data)
    for name, source in data.there.items():
        indices = range(len(source)) if everything else spread(len(source), SAMPLED)
        seen = Seen()

        def look(piece: range, source: Images = source, indices: Sequence[int] = indices) -> Seen:
            seen = Seen()
            for position in piece:
                try:
                    _look_at(source, indices[position], seen)
                except DataError as error:
                    seen.unreadable.append(str(error))
            return seen

        with progress(f"reading {name}", len(indices), "images") as advance:
            for some in in_order(look, len(indices), piece=_PIECE, processes=processes):
                seen.add(some)
                advance(len(some.heights) + len(some.unreadable))
        facts[name] = _facts(source, seen, len(indices))
    return facts


def _look_at(source: Images, index: int, seen: Seen) -> None:
    file = source.file(index)
    ((picture, label),) = source.images([index])
    channels, height, width = picture.shape
    if file is None:
        seen.stored_as["pixels"] += 1
        seen.stored_bytes += picture.numel()
    else:
        with opened(file, f"sample {index}") as header:
            seen.stored_as[header.format or "unknown"] += 1
            width, height = header.size  # a large one was decoded smaller
        seen.stored_bytes += len(file)
    seen.channels[channels] += 1
    seen.heights.append(height)
    seen.widths.append(width)
    seen.labels[label] += 1
    means, variances = zip(*(_moments(channel.numpy()) for channel in picture), strict=True)
    seen.means.append(list(means))
    seen.variances.append(list(variances))


def _moments(channel: np.ndarray) -> tuple[float, float]:
    """Return mean and variance of a channel, uint8 [H, W], scaled to 0..1: of its histogram, without rounding."""
    rows = (channel[start : start + _ROWS] for start in range(0, len(channel), _ROWS))
    counts = sum(np.bincount(some.ravel(), minlength=256) for some in rows)
    values = np.arange(256) / 255
    mean = np.average(values, weights=counts)
    return float(mean), float(np.average((values - mean) ** 2, weights=counts))


def _facts(source: Images, seen: Seen, looked_at: int) -> dict[str, Any]:
    labels = source.labels
    counts = np.bincount(labels, minlength=len(source.classes)) if labels is not None else None
    facts: dict[str, Any] = {"samples": len(source), "classes": len(source.classes)}
    if counts is not None:
        facts["samples_by_class"] = dict(zip(source.classes, counts.tolist(), strict=True))
        facts["largest_to_smallest_class"] = round(int(counts.max()) / int(counts.min()), 2) if counts.min() else None
    facts["looked_at"] = looked_at
    if seen.heights:
        mean = np.mean(seen.means, 0) if len(seen.channels) == 1 else None
        facts |= {
            "stored_as": dict(seen.stored_as),
            "stored_bytes": round(seen.stored_bytes * len(source) / len(seen.heights)),
            "channels": sorted(seen.channels),
            "height_px": _range(seen.heights),
            "width_px": _range(seen.widths),
            "mean": None if mean is None else mean.round(4).tolist(),
            # Within the pictures and between them: never below 0, as a difference of squares can be by rounding.
            "std": None if mean is None else np.sqrt(np.mean(seen.variances, 0) + np.var(seen.means, 0)).round(4).tolist(),
        }
    return facts | {"decoded": source.workers, "fingerprint": source.fingerprint, "unreadable": seen.unreadable}


def _range(sizes: list[int]) -> dict[str, int]:
    return {"min": min(sizes), "median": int(np.median(sizes)), "max": max(sizes)}


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as lines for people: the splits side by side, then what is wrong."""
    names = [name for name in facts["train"] if name not in ("samples_by_class", "unreadable")]
    splits = [split for split in Data._fields if split in facts]
    rows = [["", *splits], *([name, *(_word(facts[split].get(name)) for split in splits)] for name in names)]
    by_class = [facts[split].get("samples_by_class", {}) for split in splits]
    listed = list(by_class[0])[:_LISTED]
    rows += [[f"  class {name}", *(str(counts.get(name, 0)) for counts in by_class)] for name in listed]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"data.source={facts['source']}" + (f" data.path={facts['path']}" if facts["path"] else "")]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(by_class[0]) > len(listed):
        lines.append(f"  and {len(by_class[0]) - len(listed)} more classes (--json lists all)")
    lines += facts["not_read"]
    for split in splits:
        lines += [f"unreadable in {split}: {text}" for text in facts[split]["unreadable"]]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, str):
        return value[:16]  # of a fingerprint: the rest is in --json
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
