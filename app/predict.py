"""Classify pictures with a finished run: `python -m app.predict RUN FILES... [--top 3] [--json]`.

Pictures are brought to the size of the training images as in the evaluation: shorter side resized, centre cropped.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from app.checkpoints import model_file
from app.checkpoints.model_file import ModelConfig
from app.data.augment import Preparation
from app.data.framing import Framing, resize
from app.data.pictures import decode
from app.errors import SamerunError, leave_with
from app.options.values import positive
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one picture."""

    file: str
    classes: tuple[str, ...]
    """The most likely classes, the likeliest first."""
    probabilities: tuple[float, ...]
    """The probability of each of them, 0..1."""


def main(argv: list[str] | None = None) -> None:
    """Print the most likely classes of each picture; ends the process with the error's exit code if that fails."""
    parser = argparse.ArgumentParser(prog="python -m app.predict", description="Classify pictures with a finished run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("files", type=Path, nargs="+", metavar="file", help="picture in any format that Pillow reads")
    parser.add_argument("--top", type=positive, default=3, help="how many classes to show for each picture (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    arguments = parser.parse_args(argv)
    try:
        model, config = model_file.load(arguments.run)
        predictions = [predict(model, config, file, top=arguments.top) for file in arguments.files]
    except SamerunError as error:
        leave_with(error, rank=0)
    width = max(len(str(file)) for file in arguments.files)
    for prediction in predictions:
        if arguments.json:
            sys.stdout.write(json.dumps(vars(prediction)) + "\n")
            continue
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        likely = "  ".join(f"{name} {probability:.3f}" for name, probability in pairs)
        sys.stdout.write(f"{prediction.file:{width}}  {likely}\n")


@torch.no_grad()
def predict(model: torch.nn.Module, config: ModelConfig, file: Path, *, top: int) -> Prediction:
    """Return the `top` most likely classes of the picture in `file`. Raises DataError if it cannot be decoded."""
    picture = decode(file, channels=config.channels, name=str(file))
    height, width = config.image_size
    if height == width:
        image = Framing(image_size=height, resize_size=config.resize_size).fixed(picture)
    else:
        image = resize(picture, (height, width))
    preparation = Preparation(
        data=DataRecipe(mean=config.mean, std=config.std),
        augment=AugmentRecipe(),
        seed=0,
        channels=config.channels,
        num_classes=len(config.classes),
        dtype=getattr(torch, config.dtype),
        channels_last=False,
    )
    batch = {"images": image[None], "labels": torch.zeros(1, dtype=torch.int64), "samples": torch.zeros(1, dtype=torch.int64)}
    probabilities, best = model(preparation.evaluate(batch)).softmax(dim=1)[0].topk(min(top, len(config.classes)))
    return Prediction(str(file), tuple(config.classes[index] for index in best.tolist()), tuple(probabilities.tolist()))


if __name__ == "__main__":
    main()
