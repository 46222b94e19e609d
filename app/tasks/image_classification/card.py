"""The part of a model card that only an image classifier has. Without torch: an export needs none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.environment.topology import listed
from app.runs.model_card import CardFacts

_MOST_NAMED = 100
"""Class names listed here; model.json has all of them under facts, classes."""


def describe(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> CardFacts:
    """Return this part, given the facts of the samples and the keys and values of the recipe."""
    source, path = recipe["data.source"], recipe["data.path"]
    is_of_hub = source == "huggingface" and path and not Path(path).is_absolute() and not Path(path).exists()
    name = source if path is None else path if is_of_hub else Path(path).name
    channels, (height, width), classes = facts["channels"], facts["image_size"], facts["classes"]
    color = {1: "gray", 3: "RGB"}.get(channels, f"{channels} channels")
    size = recipe["data.image_size"]
    resized = f"the shorter side resized to {recipe['data.resize_size'] or size} pixels (bilinear, antialiased), "
    side = f"{resized}the center cropped to " if size else ""
    mean, std = (", ".join(f"{value:g}" for value in recipe[f"data.{name}"]) for name in ("mean", "std"))
    named = listed([f"{number}: {label}" for number, label in enumerate(classes)], _MOST_NAMED)
    also = f"""\
## Input and output

`model(inputs)` takes float32 [N, {channels}, {height}, {width}]: {color} images, {side}{width} x {height} pixels.
Divide pixels 0..255 by 255, subtract the mean and divide by the standard
deviation, of each channel or of all: mean {mean}; standard deviation {std}.
The output, [N, {len(classes)}], has a logit for each class. Softmax turns them into probabilities.

Classes: {named}.
"""
    return CardFacts(
        title=f"{recipe['model.name']}, which classifies images of {name}",
        data=f"`{name}`" if source == name else f"`{name}` ({source})",
        dataset=path if is_of_hub else None,
        pipeline="image-classification",
        sample="images",
        also=also,
    )
