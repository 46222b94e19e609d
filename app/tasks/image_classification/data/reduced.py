"""Large photographs decoded at 1/2, 1/4 or 1/8 of their size: data.jpeg_decoder=reduced.

libjpeg leaves out what only finer pixels need, wherever the part that becomes the image has enough without (Pillow's `draft`).
The pixels are others than those of the whole picture, but a function of the file and the crop alone: the same on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from app.data.draws import HostDraws, SampleDraws
from app.tasks.image_classification.data import jpeg
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.pictures import PictureSource

_SCALES = (8, 4, 2)
"""The factors by which libjpeg can reduce a side while decoding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReducedSource(PictureSource):
    """One split of pictures that are decoded no larger than their images need."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return images and labels, as `Source.fetch` says."""
        labels = self.read.labels
        assert labels is not None
        images = torch.empty(len(indices), self.channels, *self.image_size, dtype=torch.uint8)
        for row, index in enumerate(indices.tolist()):
            content, draws = self.read.file(index), draw.of(row) if draw else None
            image = None if content is None else reduced(content, self.framing, draws, channels=self.channels)
            if image is None:
                ((picture, _),) = self.read([index])
                image = self.framing.random(picture, draws)
            images[row] = image
        return {"images": images, "labels": torch.from_numpy(labels[indices]).long()}


def reduced(content: bytes, framing: Framing, draws: SampleDraws | None, *, channels: int) -> Tensor | None:
    """Return the image of a sample, uint8 [channels, H, W], or None if its picture must be decoded whole.

    `content` is the picture's file. `framing` needs an image_size. Without `draws` nothing is random.
    """
    header = jpeg.header_of(content, channels=channels)
    if header is None:
        return None
    assert framing.image_size is not None
    width, height = header.size
    top, left, box_height, box_width = framing.box(height, width, draws)
    scale = next((scale for scale in _SCALES if min(box_height, box_width) >= scale * framing.image_size), None)
    if scale is None:
        return None
    mode = "L" if channels == 1 else "RGB"
    header.draft(mode, (width // scale, height // scale))
    try:
        picture = header if header.mode == mode else header.convert(mode)
        # Pillow cuts between pixels, too: a whole one is up to 8 of the picture's.
        box = (left / scale, top / scale, (left + box_width) / scale, (top + box_height) / scale)
        array = np.array(picture.resize((framing.image_size, framing.image_size), Image.Resampling.BILINEAR, box))
    except OSError:  # damaged: whoever decodes it whole says how
        return None
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1)
