"""Sources whose stored pictures are read as they are, or are decoded once instead of in each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from app.data.preprocessing import progress
from app.data.samples import CHECK
from app.errors import DataError
from app.tasks.image_classification.data.arrays import ArrayReader, ArraySource
from app.tasks.image_classification.data.kept import keep
from app.tasks.image_classification.data.pictures import PictureSource, Reader
from app.tasks.image_classification.data.source import Source
from app.tasks.image_classification.data.split import Unstored, pictures_in_a_chunk

# A split whose pictures take no more bytes than this is decoded once on a machine and kept: MNIST and CIFAR are (47 and 154 MB;
# it takes some seconds), ImageNet is not.
DECODED_ONCE_BYTES = 256 << 20
# Most rows read in one go: the `datasets` library takes 5 us a row of numbers that way, and 250 one by one.
READ_CHUNK = 1000


def decoded_once(source: Source) -> Source:
    """Return a source of pictures that are all of one size and not too many as one of arrays, kept decoded; others as they are.

    Raises DataError if a picture cannot be read, or the arrays cannot be kept.
    """
    if not isinstance(source, PictureSource) or source.made_of is None or source.framing.min_area is not None:
        return source
    labels, shape, framing = source.read.labels, (len(source), source.channels, *source.image_size), source.framing
    size_bytes = int(np.prod(shape, dtype=np.int64))
    if labels is None or size_bytes > DECODED_ONCE_BYTES:
        return source
    made_of = [*source.made_of, source.fingerprint, source.channels, framing.image_size, framing.resize_size]
    split = keep(made_of, size_bytes, lambda: Unstored(shape, _decoded(source, shape), labels, source.classes))
    return ArraySource(split.images, split.labels, source.classes, source.fingerprint)


def reader_of(source: Source) -> Reader:
    """Return what reads the pictures of a source one by one, as they were before they were brought to a size."""
    if isinstance(source, PictureSource):
        return source.read
    assert isinstance(source, ArraySource), source
    return ArrayReader(source.images, source.labels)


def _decoded(source: Source, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    step = min(READ_CHUNK, pictures_in_a_chunk(shape))
    with progress("decoding the pictures once", shape[0], "pictures") as advance:
        for start in range(0, shape[0], step):
            indices = np.arange(start, min(start + step, shape[0]))
            try:
                yield source.fetch(indices, None)["images"].numpy()
            except DataError as error:
                raise DataError(f"{error}. {CHECK}") from error
            advance(len(indices))
