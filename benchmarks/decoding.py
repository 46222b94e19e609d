"""What it costs to make a training image of a JPEG: `python -m benchmarks.decoding`.

Made-up photographs of 500x375 and of 6.7 megapixels, as files in memory. Each way decodes and makes a random resized crop
of 224 (augment.resized_crop_min_area=0.08), with one thread, in turn with the others; microseconds of CPU time an image are
medians over rounds. Then, how the pixels differ from Pillow's.
"""

from __future__ import annotations

import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from app.data.draws import SampleDraws
from app.tasks.image_classification.data import jpeg
from app.tasks.image_classification.data.framing import Framing
from app.tasks.image_classification.data.pictures import decode
from app.tasks.image_classification.data.reduced import reduced

SIDE, MIN_AREA = 224, 0.08
SIZES = ((500, 375), (2992, 2244))
"""Width and height in pixels."""
_FILES, _ROUNDS = 8, 5
Way = Callable[[bytes, int], Tensor]
"""From a file and a sample number to the image, uint8 [3, SIDE, SIDE]."""


def main() -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    ways: dict[str, Way] = {
        "Pillow": with_pillow,
        **({"torchcodec": ours} if jpeg.is_installed() else {}),
        "torchvision.io.decode_jpeg": with_torchvision,
        "reduced": when_reduced,
    }
    for width, height in SIZES:
        files = [photograph(width, height, seed) for seed in range(_FILES)]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_ROUNDS):
            for name, way in ways.items():
                start_s = time.process_time()
                for number, file in enumerate(files):
                    way(file, number)
                times[name].append((time.process_time() - start_s) / len(files) * 1e6)
        for name, way in ways.items():
            differing = [(way(file, n).int() - with_pillow(file, n).int()).abs() for n, file in enumerate(files)]
            worst, mean = (
                max(int(each.max()) for each in differing),
                statistics.mean(float(each.float().mean()) for each in differing),
            )
            low, high = min(times[name]), max(times[name])
            sys.stdout.write(
                f"{width}x{height} ({len(files[0]) / 1e3:,.0f} kB)  {name:27} {statistics.median(times[name]):9,.0f} us "
                f"({low:,.0f}-{high:,.0f}), pixels differ by {mean:.2f} on average and {worst} at most\n"
            )
    return 0


def photograph(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG of quality 90 with edges, shades and some grain, so that its size is that of a photograph."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (height // 50, width // 50, 3)).astype(np.uint8))
    shades = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    fine = Image.fromarray(random.integers(0, 256, (height // 4, width // 4)).astype(np.uint8))
    edges = np.asarray(fine.resize((width, height), Image.Resampling.BILINEAR), np.int16)[..., None] // 6
    grain = random.normal(0, 3, (height, width, 1)).astype(np.int16)
    written = io.BytesIO()
    Image.fromarray(np.clip(shades + edges - 20 + grain, 0, 255).astype(np.uint8)).save(written, "JPEG", quality=90)
    return written.getvalue()


def ours(file: bytes, sample: int) -> Tensor:
    """As training does where torchcodec is installed."""
    picture = decode(io.BytesIO(file), channels=3, name="made up")
    return Framing(image_size=SIDE, min_area=MIN_AREA).random(picture, SampleDraws(0, sample))


def with_pillow(file: bytes, sample: int) -> Tensor:
    """As training does where it is not."""
    with Image.open(io.BytesIO(file)) as opened:
        picture = torch.from_numpy(np.array(opened)).permute(2, 0, 1)
    return Framing(image_size=SIDE, min_area=MIN_AREA).random(picture, SampleDraws(0, sample))


def with_torchvision(file: bytes, sample: int) -> Tensor:
    """With torchvision's decoder, which is deprecated since 0.29."""
    from torchvision.io import ImageReadMode, decode_jpeg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        picture = decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return Framing(image_size=SIDE, min_area=MIN_AREA).random(picture, SampleDraws(0, sample))


def when_reduced(file: bytes, sample: int) -> Tensor:
    """As training does with data.jpeg_decoder=reduced."""
    image = reduced(file, Framing(image_size=SIDE, min_area=MIN_AREA), SampleDraws(0, sample), channels=3)
    return ours(file, sample) if image is None else image


if __name__ == "__main__":
    sys.exit(main())
