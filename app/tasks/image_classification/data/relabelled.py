"""Data of which a model numbers the classes otherwise: other samples than those it was trained on, matched by class names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from app.errors import DataError
from app.place.topology import listed
from app.tasks.image_classification.data.arrays import ArraySource
from app.tasks.image_classification.data.pictures import PictureSource, Reader
from app.tasks.image_classification.data.source import Source


def relabelled(source: Source, classes: Sequence[str]) -> Source:
    """Return the source with the labels of a model whose classes these are.

    Raises DataError if the model does not know one of the source's classes, or has two of one name.
    """
    known = tuple(classes)
    if known == source.classes:
        return source
    numbers = np.array(_labels_by_name(source.classes, known), dtype=np.int64)
    if isinstance(source, ArraySource):
        return replace(source, labels=numbers[source.labels], classes=known)
    assert isinstance(source, PictureSource), source
    return replace(source, read=_Relabelled(source.read, numbers), classes=known)


@dataclass(frozen=True, eq=False)
class _Relabelled:
    """Reads pictures whose labels become others."""

    read: Reader
    numbers: np.ndarray
    """int64 [classes of the data]: the label that each becomes."""

    @property
    def labels(self) -> np.ndarray | None:
        """All labels, as `Reader` says."""
        labels = self.read.labels
        return None if labels is None else self.numbers[labels]

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Yield pictures and labels, as `Reader` says."""
        for picture, label in self.read(indices):
            yield picture, int(self.numbers[label])

    def file(self, index: int) -> bytes | None:
        """Return the picture's file, as `Reader` says."""
        return self.read.file(index)


def _labels_by_name(classes: Sequence[str], known: Sequence[str]) -> list[int]:
    """Return where each of the classes is among those that a model knows, by its name. Raises DataError."""
    other = [repr(name) for name in classes if name not in known]
    if other:
        raise DataError(
            f"the model does not know {len(other)} of the data's {len(classes)} classes: {listed(other)}. It "
            f"knows {listed([repr(name) for name in known])}. Classes are matched by name: rename the classes "
            "of the data, or leave the unknown ones out"
        )
    repeated = [repr(name) for name in known if list(known).count(name) > 1]
    if repeated:
        raise DataError(
            "the model has several classes with the same name, so classes of other data cannot be matched by "
            f"name: {listed(repeated)}"
        )
    return [list(known).index(name) for name in classes]
