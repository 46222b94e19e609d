"""What a model card tells of a network that classifies pictures. Without torch: an export needs none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.runs.model_card import CardFacts

_MOST_NAMED = 100
"""Class names listed here; model.json has them all."""


def describe(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> CardFacts:
    """Return it, by the facts of the samples and the keys and values of the recipe."""
    source, path = recipe["data.source"], recipe["data.path"]
    is_of_hub = source == "huggingface" and path and not Path(path).is_absolute() and not Path(path).exists()
    name = source if path is None else path if is_of_hub else Path(path).name
    kind = "" if source == name else f" ({source})"
    return CardFacts(
        title=f"{recipe['model.name']}, which classifies pictures of {name}",
        data=f"`{name}`{kind}",
        dataset=path if is_of_hub else None,
        pipeline="image-classification",
        sample="pictures",
        also=_input(facts, recipe),
    )


def _input(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    channels, (height, width), classes = facts["channels"], facts["image_size"], facts["classes"]
    kind = {1: "gray", 3: "RGB"}.get(channels, f"{channels} channels")
    size = recipe["data.image_size"]
    resized = f"the shorter side resized to {recipe['data.resize_size'] or size} pixels (bilinear, antialiased), "
    side = f"{resized}the centre cropped to " if size else ""
    mean, std = (", ".join(f"{value:g}" for value in recipe[f"data.{name}"]) for name in ("mean", "std"))
    named = ", ".join(f"{at}: {name}" for at, name in enumerate(classes[:_MOST_NAMED]))
    more = f", ... ({len(classes)} in all; `model.json` has them under facts, classes)" if len(classes) > _MOST_NAMED else ""
    return f"""\
## Input and output

`model(inputs)` takes float32 [N, {channels}, {height}, {width}]: {kind} pictures, {side}{width} x {height} pixels.
Divide pixels 0..255 by 255, subtract the mean and divide by the standard
deviation, of each channel or of all: mean {mean}; standard deviation {std}.
The output, [N, {len(classes)}], has a logit for each class. Softmax turns them into probabilities.

Classes: {named}{more}.
"""
