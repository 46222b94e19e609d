"""Data of the shape that an example reads, where it reads none that a package ships."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = {1: ["tcp", "udp", "icmp"], 2: [f"service_{number}" for number in range(61)], 3: [f"S{number}" for number in range(11)]}
"""By column, as many as give 113 features with the 38 columns of numbers."""


def nsl_kdd(folder: Path, *, train: int = 600, test: int = 203) -> Path:
    """KDDTrain+.txt and KDDTest+.txt: 41 columns, what the connection was, and a difficulty."""
    chance = random.Random(0)
    folder.mkdir()
    for name, size in (("KDDTrain+.txt", train), ("KDDTest+.txt", test)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(_connection(chance, number) for number in range(size))
    return folder


def _connection(chance: random.Random, number: int) -> list[object]:
    row: list[object] = [round(chance.expovariate(0.1), 2) for _ in range(41)]
    for column, words in WORDS.items():
        row[column] = words[number % len(words)]
    is_attack = chance.random() < 0.5
    row[4] = int(row[4]) * (100 if is_attack else 1)  # type: ignore[call-overload]
    return [*row, "neptune" if is_attack else "normal", 21]


def pictures(folder: Path, *, train: int = 64, val: int = 25) -> Path:
    """train/ and val/ with a folder for each of two classes: reddish and bluish noise."""
    chance = np.random.default_rng(0)
    for split, size in (("train", train), ("val", val)):
        for number in range(size):
            noise = chance.integers(0, 128, (40, 48, 3))
            noise[:, :, 2 * (number % 2)] += 96
            place = folder / split / ("blue" if number % 2 else "red")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.astype(np.uint8)).save(place / f"{number}.png")
    return folder
