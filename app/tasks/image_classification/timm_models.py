"""Networks of timm: built by name, with the preprocessing of timm's configuration, and exported in timm's format.

A configuration (`pretrained_cfg`) is part of timm, or of the config.json that timm saves next to weights. timm is imported for
these networks alone: it takes seconds, and is an extra.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import RecipeError, did_you_mean
from app.files import text_files
from app.tasks.image_classification.sections import TIMM, DataRecipe

_CONFIG = "config.json"


def build(name: str, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Return the network `timm:NAME` on the CPU, with new weights, for images [B, C=channels, H, W].

    Its repeated layers are named in `_no_split_modules`, as transformers does. Raises RecipeError if timm does not have it, and
    timm's own errors if it does not take images of this size.
    """
    arguments = _arguments(name, channels, image_size)
    model: nn.Module = _zoo().create_model(name.removeprefix(TIMM), num_classes=num_classes, **arguments)
    lists = [it for path, it in model.named_modules() if path.rpartition(".")[2] == "blocks"]  # timm's name for repeated layers
    layers = [layer for it in lists if isinstance(it, nn.Sequential | nn.ModuleList) for layer in it]
    blocks = {type(it).__name__ for it in layers if not isinstance(it, nn.Sequential | nn.ModuleList) and [*it.parameters()]}
    model._no_split_modules = sorted(blocks)  # type: ignore[assignment]
    return model


def preprocessing(name: str, data: DataRecipe, left_out: Collection[str], weights: str | None) -> tuple[dict[str, Any], str]:
    """Return values for keys of `data`, by key, and their origin; the recipe leaves out the keys `left_out`.

    They come from the config.json in the folder of the initial weights, if it is timm's, else from timm's configuration of
    `timm:NAME`. Raises RecipeError if timm does not have it, or config.json cannot be read.
    """
    found, origin = _configuration(name), f"timm's configuration of {name.removeprefix(TIMM)}"
    file = Path(text_files.filled_in("train.init_from", weights), _CONFIG) if weights else None
    try:
        if file is not None and file.is_file():
            whole, origin = text_files.parsed(file.read_bytes()), str(file)
            stored = whole.get("pretrained_cfg", whole)  # older versions of timm wrote one level
            found.update((key, stored[key]) for key in found.keys() & stored.keys())
            sides = whole.get("model_args", {}).get("img_size", found["input_size"][1:])
            found["input_size"] = [0, sides, sides] if isinstance(sides, int) else [0, *sides]
        values: dict[str, Any] = {f"data.{key}": tuple(map(float, found[key])) for key in ("mean", "std")}
        _, height, width = map(int, found["input_size"])
        if height == width:
            values["data.image_size"] = height
        size = values.get("data.image_size") if "data.image_size" in left_out else data.image_size
        if size is not None:
            values["data.resize_size"] = max(size, math.floor(size / found["crop_pct"]))
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise RecipeError(f"{file}, next to the weights of train.init_from, is not timm's configuration: {error!r}") from error
    if found["interpolation"] in ("bilinear", "bicubic"):
        values["data.interpolation"] = found["interpolation"]
    return values, origin


def config(recipe: Mapping[str, Any], facts: Mapping[str, Any], normalization: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for `timm.create_model("local-dir:FOLDER", pretrained=True)`, given the recipe's keys and values.

    `facts` are the facts of the images, `normalization` their mean and std by channel. Raises RecipeError as `build`.
    """
    name, channels, size, num_classes = recipe["model.name"], facts["channels"], facts["image_size"], len(facts["classes"])
    with torch.device("meta"):
        model: Any = build(name, channels=channels, image_size=size, num_classes=num_classes)
    # timm resizes to floor(size / crop_pct), which rounding could make a pixel smaller.
    resized = recipe["data.resize_size"] or size[0]
    crop_pct = 1.0 if resized == size[0] else math.nextafter(size[0] / resized, 0)
    kept = {key: model.pretrained_cfg.get(key) for key in ("fixed_input_size", "first_conv", "classifier")}
    framing = {"interpolation": recipe["data.interpolation"], "crop_pct": crop_pct, "crop_mode": "center"}
    return {
        "architecture": model.pretrained_cfg["architecture"],
        "num_classes": num_classes,
        "num_features": model.num_features,
        "label_names": facts["classes"],
        "model_args": _arguments(name, channels, size),
        "pretrained_cfg": {**kept, **framing, **normalization, "input_size": [channels, *size], "num_classes": num_classes},
    }


def _arguments(name: str, channels: int, image_size: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a network for these images; only networks of one size take a size."""
    is_fixed = _configuration(name).get("fixed_input_size", False)
    return {"in_chans": channels, **({"img_size": image_size} if is_fixed else {})}


def _configuration(name: str) -> dict[str, Any]:
    zoo, name = _zoo(), name.removeprefix(TIMM)
    try:
        found: dict[str, Any] = zoo.get_pretrained_cfg(name, allow_unregistered=False).to_dict()
    except RuntimeError as error:
        known = [*zoo.list_models(), *zoo.list_models(pretrained=True)]
        hint = did_you_mean(name, known, otherwise="timm.list_models() lists them")
        here = f"model.name is {TIMM}{name}: the installed timm {zoo.__version__} has no such model"
        raise RecipeError(f"{here}; {hint}") from error
    return found


def _zoo() -> Any:
    try:
        import timm
    except ModuleNotFoundError as error:
        raise RecipeError('model.name names a model of timm, which is not installed: pip install -e ".[timm]"') from error
    return timm
