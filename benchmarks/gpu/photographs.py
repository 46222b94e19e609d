"""Files with the size and the coarseness of photographs, and these packed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from launch.run_module import program

_SIZE = (500, 375)  # pixels: about the mean of ImageNet's


def write(folder: Path, count: int, *, classes: int) -> None:
    """Write JPEG files in class folders: so many to train, and one of each class to evaluate."""
    for split in ("train", "val"):
        for label in range(classes):
            (folder / split / str(label)).mkdir(parents=True)
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(partial(_write, folder, count, classes), range(count + classes))


def _write(folder: Path, count: int, classes: int, number: int) -> None:
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(number).integers(256, size=(_SIZE[1] // 8, _SIZE[0] // 8, 3), dtype=np.uint8)
    place = folder / ("train" if number < count else "val") / str(number % classes)
    Image.fromarray(coarse).resize(_SIZE, Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)


def pack(photographs: Path, packed: Path, *, shorter_side: int) -> None:
    """Shrink them by `samerun data pack`. Raises CalledProcessError if that fails."""
    command = [*program("launch.cli"), "data", "pack", str(photographs), "--to", "imagefolder"]
    subprocess.run([*command, "--out", str(packed), "--max-side", str(shorter_side)], check=True, stdout=sys.stderr)
