"""What the data path costs: `python -m benchmarks.feeding`.

The memory that a process takes for N samples and for 10 N, of one size (idx files) and of any (a folder of JPEG files, and the
same as shards of WebDataset); and for those of one size the time of one look-up in a file that is mapped beside one in an
array in memory. Made-up data in a temporary folder; nothing is left behind.
"""

from __future__ import annotations

import functools
import gzip
import os
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.recipe.schema import Recipe
from app.tasks.image_classification.data import idx
from app.tasks.image_classification.data.arrays import ArraySource
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.data.source import Source
from app.tasks.image_classification.data.split import Images
from app.tasks.image_classification.data.writers import WRITERS, Record
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections
from benchmarks.memory import peak_anonymous_bytes

_BATCH = 128
_LOOK_UPS = 4000
_SIZES = (60_000, 600_000)
_DECODED_SIZES = (6_000, 60_000)
_PER_FOLDER = 600
_CROPPED = AugmentRecipe(resized_crop_min_area=0.5)
"""What is cropped anew in each epoch is decoded each time, however small."""


def main() -> int:
    """Print what was measured, as docs/performance-data.md has it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SAMERUN_CACHE"] = str(folder / "cache")  # of this program, which ends with its folder
        for compress in (False, True):
            for size in _SIZES:
                recipe = made_up(folder / f"{size}{'.gz' if compress else ''}", size, compress=compress)
                _say_memory("compressed" if compress else "plain", size, recipe)
        for size in _DECODED_SIZES:
            recipe = made_up_pictures(folder / f"{size}.jpg", size)
            _say_memory("JPEG files", size, recipe)
            _say_memory("WebDataset", size, _packed(recipe, folder / f"{size}.tar"))
        mapped = open_data(made_up(folder / "look-ups", _SIZES[0], compress=False).sections).train
        assert isinstance(mapped, ArraySource)
        held = ArraySource(Images(mapped.images.array.copy()), mapped.labels.copy(), mapped.classes, mapped.fingerprint)
        for turn in range(3):
            times = ", ".join(
                f"{name} {_look_up_us(source, turn):.1f} us" for name, source in (("mapped", mapped), ("held", held))
            )
            _say(f"{_BATCH} of {len(mapped):,} pictures of 28x28: {times} (medians of {_LOOK_UPS:,})")
    return 0


def made_up(folder: Path, size: int, *, compress: bool) -> Recipe:
    """Make idx files of `size` black pictures of 28x28 and return their recipe; plain ones take no room on a disk."""
    folder.mkdir()
    for images, labels, count in ((idx.FILES[0], idx.FILES[1], size), (idx.FILES[2], idx.FILES[3], _BATCH)):
        _write(folder / images, (count, 28, 28), compress=compress)
        _write(folder / labels, (count,), compress=compress)
    return Recipe(sections=Sections(data=DataRecipe(source="mnist", path=str(folder))))


def made_up_pictures(folder: Path, size: int) -> Recipe:
    """Make `size` JPEG files, all of them one small picture, in class folders and return their recipe."""
    import torchvision.datasets.folder  # noqa: F401 - its 85 MB are no part of what is measured in the forks
    from PIL import Image

    for label in range(size // _PER_FOLDER):
        place = folder / "train" / str(label)
        place.mkdir(parents=True)
        first = place / "0.jpg"
        Image.new("RGB", (16, 16)).save(first)
        for number in range(1, _PER_FOLDER):
            os.link(first, place / f"{number}.jpg")
    data = DataRecipe(source="imagefolder", path=str(folder), test_split="train", image_size=8)
    return Recipe(sections=Sections(data=data, augment=_CROPPED))


def _packed(recipe: Recipe, folder: Path) -> Recipe:
    """Write an image folder's pictures as WebDataset shards and return their recipe."""
    assert recipe.sections.data.path is not None
    files = sorted(Path(recipe.sections.data.path, "train").rglob("*.jpg"))
    records = (Record(f"{file.parent.name}/{file.stem}", file.read_bytes(), "jpg", int(file.parent.name)) for file in files)
    classes = [str(label) for label in range(len(files) // _PER_FOLDER)]
    WRITERS["webdataset"](folder, "train", classes, records)
    return recipe.with_sections(data=replace(recipe.sections.data, source="webdataset", path=str(folder)))


def look_at_all(recipe: Recipe) -> None:
    """Open the recipe's data and fetch every training sample once."""
    source = open_data(recipe.sections).train
    for start in range(0, len(source), _BATCH):
        indices = np.arange(start, min(start + _BATCH, len(source)))
        source.fetch(indices, None)


def _say_memory(kind: str, size: int, recipe: Recipe) -> None:
    first, later = (peak_anonymous_bytes(functools.partial(look_at_all, recipe)) / 2**20 for _ in range(2))
    _say(f"{kind:10} {size:9,} samples: {first:5.1f} MiB of its own when first opened, {later:5.1f} later")


def _look_up_us(source: Source, seed: int) -> float:
    random, elapsed_s = np.random.default_rng(seed), []
    for _ in range(_LOOK_UPS):
        indices = random.integers(0, len(source), _BATCH)
        start_s = time.perf_counter()
        source.fetch(indices, None)
        elapsed_s.append(time.perf_counter() - start_s)
    return statistics.median(elapsed_s) * 1e6


def _write(path: Path, shape: tuple[int, ...], *, compress: bool) -> None:
    header, size_bytes = struct.pack(f">I{len(shape)}I", 0x800 | len(shape), *shape), int(np.prod(shape))
    if not compress:
        path.write_bytes(header)
        os.truncate(path, len(header) + size_bytes)
        return
    with gzip.open(f"{path}.gz", "wb", compresslevel=1) as file:
        file.write(header)
        for start in range(0, size_bytes, 1 << 20):
            file.write(bytes(min(1 << 20, size_bytes - start)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
