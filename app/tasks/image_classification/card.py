"""The part of a model card that only an image classifier has, and the files that describe the network and its images.

Without torch: an export needs none, unless the network is timm's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.environment.topology import listed
from app.runs.model_card import CardFacts
from app.tasks.image_classification.sections import CONVNET, TIMM, torchvision_arguments

_LOADED_BY_TIMM = """\
import timm

model = timm.create_model("local-dir:THIS_FOLDER", pretrained=True).eval()
"""
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
    interpolation = recipe.get("data.interpolation", "bilinear")  # a checkpoint of an earlier version has no such key
    recipe = {**recipe, "data.interpolation": interpolation}
    resized = f"the shorter side resized to {recipe['data.resize_size'] or size} pixels ({interpolation}, antialiased), "
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
    of_timm = {"library": "timm", "use": _LOADED_BY_TIMM} if recipe["model.name"].startswith(TIMM) else {}
    return CardFacts(
        **of_timm,
        title=f"{recipe['model.name']}, which classifies images of {name}",
        data=f"`{name}`" if source == name else f"`{name}` ({source})",
        dataset=path if is_of_hub else None,
        pipeline="image-classification",
        sample="images",
        also=also,
        files={name: (json.dumps(values, indent=2) + "\n").encode() for name, values in _files(facts, recipe).items()},
    )


_RESAMPLING = {"bilinear": 2, "bicubic": 3}
"""Pillow's numbers of interpolations, which transformers uses."""


def _files(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the content of the files, by name.

    config.json describes the network: for timm in its format, else with the arguments of `torchvision.models.get_model`.
    preprocessor_config.json describes the images, with the key names of transformers. It names no class of transformers, whose
    processors (5.24) round the corner of the center crop down: torchvision and `Framing` round it to the nearest pixel.
    """
    name, channels, (height, width), classes = recipe["model.name"], facts["channels"], facts["image_size"], facts["classes"]
    values = {key: recipe[f"data.{key}"] for key in ("mean", "std")}
    normalization = {key: [*it] * (channels // len(it)) for key, it in values.items()}
    is_framed = recipe["data.image_size"] is not None
    images = {
        "do_convert_rgb": channels == 3,
        "do_resize": is_framed,
        "size": {"shortest_edge": recipe["data.resize_size"] or height},
        "resample": _RESAMPLING[recipe["data.interpolation"]],
        "do_center_crop": is_framed,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": normalization["mean"],
        "image_std": normalization["std"],
    }
    if name.startswith(TIMM):
        from app.tasks.image_classification import timm_models

        return {"config.json": timm_models.config(recipe, facts, normalization), "preprocessor_config.json": images}
    network = {
        "architecture": name,
        "library": "samerun" if name == CONVNET else "torchvision",
        "model_args": {"num_classes": len(classes), **torchvision_arguments(name, (height, width))},
        "num_channels": channels,
        "image_size": [height, width],
        "id2label": dict(enumerate(classes)),
        "label2id": {label: number for number, label in enumerate(classes)},
    }
    return {"config.json": network, "preprocessor_config.json": images}
