"""Single pictures, classified: brought to the size of the training images as in the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from app.tasks.image_classification.data.decoding import content_of, decode
from app.tasks.image_classification.data.framing import Framing, resize


def image_of(file: Path, facts: Mapping[str, Any], *, resize_size: int | None) -> Tensor:
    """Return the picture in a file as the model sees it, uint8 [C, H, W]. Raises DataError if it cannot be decoded."""
    picture = decode(content_of(file), channels=facts["channels"], name=str(file))
    height, width = facts["image_size"]
    if height == width:
        return Framing(image_size=height, resize_size=resize_size).fixed(picture)
    return resize(picture, (height, width))


def likeliest(logits: Tensor, classes: list[str], *, top: int) -> tuple[str, dict[str, Any]]:
    """Return the `top` likeliest classes of logits [K] with their probabilities, in words and as JSON holds them."""
    probabilities, best = logits.softmax(dim=0).topk(min(top, len(classes)))
    names, shares = [classes[index] for index in best.tolist()], probabilities.tolist()
    words = "  ".join(f"{name} {share:.3f}" for name, share in zip(names, shares, strict=True))
    return words, {"classes": names, "probabilities": shares}
