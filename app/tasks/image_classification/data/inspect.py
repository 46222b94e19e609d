"""`samerun data inspect`: what data there is, before anything is trained on it."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from app.data.preprocessing import in_order, progress
from app.errors import DataError
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.decoding import opened
from app.tasks.image_classification.data.images import Images, spread
from app.tasks.image_classification.data.open import not_read, open_stored

SPLITS = ("train", "validation", "test")
SAMPLED = 512
"""Pictures examined per split, unless --all is given."""
_PIECE = 16
_LISTED_CLASSES = 20


class Examined(NamedTuple):
    """A picture that was read."""

    format: str
    stored_bytes: int
    height: int
    width: int
    histogram: np.ndarray
    """Share of the pixels with each value, by channel: float64 [C, 256]."""


def inspect(recipe: Recipe, *, everything: bool, processes: int) -> dict[str, Any]:
    """Return facts on a recipe's data, by split, as JSON has them: of all pictures with `everything`, else of some.

    `processes` read and decode. Raises DataError or RecipeError if the data cannot be opened.
    """
    data = open_stored(recipe.sections)
    facts: dict[str, Any] = {"source": recipe.sections.data.source, "path": recipe.sections.data.path}
    facts["not_read"] = not_read(data)
    for split, images in data.items():
        indices = range(len(images)) if everything else spread(len(images), SAMPLED)

        def look(piece: range, images: Images = images, indices: Any = indices) -> list[Examined | str]:
            return [_examined(images, indices[position]) for position in piece]

        examined: list[Examined] = []
        unreadable: list[str] = []
        with progress(f"reading {split}", len(indices), "images") as advance:
            for some in in_order(look, len(indices), piece=_PIECE, processes=processes):
                examined += [picture for picture in some if not isinstance(picture, str)]
                unreadable += [error for error in some if isinstance(error, str)]
                advance(len(some))
        facts[split] = {**_facts(images, examined), "looked_at": len(indices), "unreadable": unreadable}
    return facts


def _examined(images: Images, index: int) -> Examined | str:
    """Return a picture's facts, or the error if it cannot be read."""
    try:
        ((picture, _),) = images.images([index])
        (height, width), file = picture.shape[1:], images.file(index)
        kind, size_bytes = "pixels", picture.numel()
        if file is not None:
            with opened(file, f"sample {index}") as header:  # whose size is right for a large one, which is decoded smaller
                kind, size_bytes, (width, height) = header.format or "unknown", len(file), header.size
    except DataError as error:
        return str(error)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in picture])
    return Examined(kind, size_bytes, height, width, (counts.double() / picture[0].numel()).numpy())


def _facts(images: Images, examined: list[Examined]) -> dict[str, Any]:
    facts: dict[str, Any] = {"samples": len(images), "classes": len(images.classes)}
    if images.labels is not None:
        counts = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        facts["samples_by_class"] = dict(zip(images.classes, counts, strict=True))
    if examined:
        channels = sorted({len(picture.histogram) for picture in examined})
        sizes = {"height_px": [picture.height for picture in examined], "width_px": [picture.width for picture in examined]}
        facts |= {
            "stored_as": dict(Counter(picture.format for picture in examined)),
            "stored_bytes": round(np.mean([picture.stored_bytes for picture in examined]) * len(images)),
            "channels": channels,
            **{name: {"min": min(of), "median": int(np.median(of)), "max": max(of)} for name, of in sizes.items()},
        }
        if len(channels) == 1:
            shares, values = np.mean([picture.histogram for picture in examined], 0), np.arange(256) / 255
            mean = shares @ values
            variance = (shares * (values - mean[:, None]) ** 2).sum(1)
            facts |= {"mean": mean.round(4).tolist(), "std": np.sqrt(variance).round(4).tolist()}
    return facts | {"decoded": images.workers, "fingerprint": images.fingerprint}


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as a table with a column for each split, and what is wrong below it."""
    splits = [split for split in SPLITS if split in facts]
    names = dict.fromkeys(name for split in splits for name in facts[split] if name not in ("samples_by_class", "unreadable"))
    rows = [["", *splits], *([name, *(_word(facts[split].get(name)) for split in splits)] for name in names)]
    by_class = [facts[split].get("samples_by_class", {}) for split in splits]
    listed = list(by_class[0])[:_LISTED_CLASSES]
    rows += [[f"  class {name}", *(str(counts.get(name, 0)) for counts in by_class)] for name in listed]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"data.source={facts['source']}" + (f" data.path={facts['path']}" if facts["path"] else "")]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(by_class[0]) > len(listed):
        lines.append(f"  and {len(by_class[0]) - len(listed)} more classes (--json lists all)")
    lines += facts["not_read"]
    lines += [f"unreadable in {split}: {text}" for split in splits for text in facts[split]["unreadable"]]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, str):
        return value[:16]  # of a fingerprint: the rest is in --json
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
