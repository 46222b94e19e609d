"""What a source of samples is: one split of a data set, opened and checked.

A source is `Samples` whose batches are uint8 images, not normalized, and labels. `open.py` makes those that a recipe
asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from app.data.draws import HostDraws
from app.data.samples import Samples
from app.errors import DataError

# How many samples' contents a fingerprint covers: few enough to read from a cold network disk in about a second.
FINGERPRINT_SAMPLES = 64
_LISTING_CHUNK = 1 << 16
DOWNLOADS = "data"
"""The folder of downloads, unless data.path says another."""


class Source(Samples, Protocol):
    """One split of pictures."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class; a label is an index into it."""

    @property
    def channels(self) -> int:
        """Channels of each image."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of each image that `fetch` returns."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data on every machine; the function `fingerprint` says what it covers."""

    @property
    def remedy(self) -> str:
        """What helps where training waits for these pictures."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:
        """Return `images`, uint8 [B, C, H, W], and `labels`, int64 [B], as `Samples.fetch` says."""


class NoTraining:
    """In the place of training pictures that are not there: whoever needs them is told why, and others are not."""

    def __init__(self, why: DataError) -> None:
        self.why = why

    def __len__(self) -> int:
        raise self.why

    def __getattr__(self, name: str) -> Any:
        raise self.why


class Data(NamedTuple):
    """The splits of a recipe's data. None: there is no such split."""

    train: Source
    """`NoTraining`: there is none."""
    validation: Source | None
    test: Source | None

    @property
    def there(self) -> dict[str, Source]:
        """The splits that there are, by name."""
        return {name: source for name, source in self._asdict().items() if not isinstance(source, NoTraining | None)}

    def changed(self, change: Callable[[Source], Source]) -> Data:
        """Return the splits with each of them changed."""
        return self._replace(**{name: change(source) for name, source in self.there.items()})


def facts_of(source: Source) -> dict[str, Any]:
    """Return the facts of a split of pictures: what a network for them is built by, as JSON holds it."""
    return {"classes": list(source.classes), "channels": source.channels, "image_size": list(source.image_size)}


def check_labels(
    labels: np.ndarray, num_classes: int, *, where: str, number: Callable[[int], int] = lambda index: index
) -> None:
    """Check that there are samples and that all labels (int [N]) are in 0 .. num_classes - 1.

    `number` gives what a sample is called, from its place among the labels. Raises DataError, which says `where` ("the train
    split of ...") and names the first offending sample.
    """
    if labels.size == 0:
        raise DataError(f"{where} has no samples")
    if labels.min() >= 0 and labels.max() < num_classes:
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        index = int(wrong[0])
        raise DataError(
            f"sample {number(index)} of {where} has label {int(labels[index])}, but labels must be in "
            f"0..{num_classes - 1} ({wrong.size} of {labels.size} are not); correct the labels, or remove "
            "these samples"
        )


def first_line(error: Exception) -> str:
    """Return what a library's error says, in one line for a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fingerprint(
    classes: Sequence[str],
    size: int,
    content: Callable[[int], bytes],
    *,
    listing: Sequence[np.ndarray | memoryview] = (),
    samples: int = FINGERPRINT_SAMPLES,
) -> str:
    """Return a SHA-256, in hexadecimal, that tells two data sets apart without reading all of them.

    It covers the class names, the number of samples, the `content` of `samples` samples spread evenly from the first to the
    last, and `listing`: what is known of every sample, as all labels in an array, or all relative paths as bytes. It does not
    see a change of one image between those. Dates and absolute paths take no part.
    """
    digest = hashlib.sha256()

    def cover(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    cover(json.dumps([size, *classes]).encode())
    digest.update(sum(8 * part.size if isinstance(part, np.ndarray) else len(part) for part in listing).to_bytes(8, "little"))
    for part in listing:
        if isinstance(part, memoryview):
            digest.update(part)
            continue
        for start in range(0, part.size, _LISTING_CHUNK):  # a copy of all of them would grow with the data
            digest.update(part[start : start + _LISTING_CHUNK].astype(np.int64).tobytes())
    for index in spread(size, samples):
        cover(content(index))
    return digest.hexdigest()


def spread(size: int, count: int) -> list[int]:
    """Return up to `count` different indices spread evenly over 0 .. size - 1, both ends included."""
    count = min(size, count)
    return [index * (size - 1) // max(1, count - 1) for index in range(count)]
