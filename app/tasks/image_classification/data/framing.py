"""From pictures of any size to the one size that the model sees.

The geometry is torchvision's, so that published recipes keep their meaning: `Resize` and `CenterCrop`, or
`RandomResizedCrop`, all bilinear with antialiasing. The random crop is a function of the sample's draws alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from app.data.draws import SampleDraws
from app.tasks.image_classification.sections import Sections

# torchvision's RandomResizedCrop: how often it tries, and between which shapes (width / height).
TRIES = 10
RATIOS = (3 / 4, 4 / 3)


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How pictures become images of one size."""

    image_size: int | None = None
    """Side in pixels of the images; None leaves pictures as they are."""
    resize_size: int | None = None
    """Pixels the shorter side gets before the centre crop; None: image_size."""
    min_area: float | None = None
    """Smallest share of the picture that a random crop keeps; None: the centre crop. Needs image_size."""

    @classmethod
    def of(cls, recipe: Sections, *, training: bool) -> Framing:
        """Return the framing a recipe asks for; only training pictures are cropped at random."""
        data, min_area = recipe.data, recipe.augment.resized_crop_min_area
        return cls(image_size=data.image_size, resize_size=data.resize_size, min_area=min_area if training else None)

    def size_of(self, stored: tuple[int, int]) -> tuple[int, int]:
        """Return height and width in pixels of the image made of a picture of `stored` height and width."""
        return stored if self.image_size is None else (self.image_size, self.image_size)

    def random(self, picture: Tensor, draws: SampleDraws | None) -> Tensor:
        """Return the image of a picture (uint8 [C, H, W]) for a sample's draws; without them or min_area, the `fixed` one."""
        if self.image_size is None or self.min_area is None or draws is None:
            return self.fixed(picture)
        height, width = picture.shape[-2:]
        top, left, box_height, box_width = crop_box(height, width, draws, min_area=self.min_area)
        return resize(picture[..., top : top + box_height, left : left + box_width], (self.image_size, self.image_size))

    def fixed(self, pictures: Tensor) -> Tensor:
        """Return the images of pictures of one size (uint8 [..., C, H, W]), resized and cropped at the centre."""
        if self.image_size is None:
            return pictures
        height, width, target = *pictures.shape[-2:], self.resize_size or self.image_size
        size = int(target * height / min(height, width)), int(target * width / min(height, width))
        top, left = round((size[0] - self.image_size) / 2), round((size[1] - self.image_size) / 2)
        return resize(pictures, size)[..., top : top + self.image_size, left : left + self.image_size]


def crop_box(height: int, width: int, draws: SampleDraws, *, min_area: float) -> tuple[int, int, int, int]:
    """Return top, left, height and width in pixels of a random part of a picture of the given size.

    As torchvision's RandomResizedCrop.get_params: of up to ten boxes, with an area uniform in [min_area, 1] of the picture
    and a logarithm of width / height uniform in log(3/4)..log(4/3), the first that fits; else the largest central box with
    a shape in that range.
    """
    low, high = (math.log(ratio) for ratio in RATIOS)
    for attempt in range(TRIES):
        area = height * width * (min_area + (1 - min_area) * draws.uniform(f"crop area {attempt}"))
        ratio = math.exp(low + (high - low) * draws.uniform(f"crop ratio {attempt}"))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = draws.integers("crop top", height - box_height + 1)
            return top, draws.integers("crop left", width - box_width + 1), box_height, box_width
    box_height, box_width = min(height, round(width / RATIOS[0])), min(width, round(height * RATIOS[1]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resize(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Return `pictures` (uint8 [..., C, H, W], on the CPU) at `size` (height, width), bilinear with antialiasing."""
    if tuple(pictures.shape[-2:]) == size:
        return pictures
    flat = pictures.reshape(-1, *pictures.shape[-3:])
    resized = F.interpolate(flat, size=size, mode="bilinear", antialias=True)
    return resized.reshape(*pictures.shape[:-2], *size)
