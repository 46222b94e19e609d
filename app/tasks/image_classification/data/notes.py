"""Notes on the data before a run: not errors, but perhaps not what was meant."""

from __future__ import annotations

import numpy as np

from app.tasks.image_classification.data.decoded import reader_of
from app.tasks.image_classification.data.folders import FileReader
from app.tasks.image_classification.data.listing import counted
from app.tasks.image_classification.data.open import Data

_NAMED = 5
"""Classes that are named."""


def notes_on(data: Data) -> list[str]:
    """Return a sentence for each thing that was seen: classes without a training sample, files that are no pictures."""
    notes = []
    reader, classes = reader_of(data.train), data.train.classes
    if reader.labels is not None:
        empty = np.flatnonzero(np.bincount(reader.labels, minlength=len(classes)) == 0)
        if empty.size:
            named = ", ".join(repr(classes[index]) for index in empty[:_NAMED])
            notes.append(
                (
                    f"{empty.size} of the {len(classes)} classes have no training samples "
                    f"({named}{' and others' if empty.size > _NAMED else ''}), but the model has an output "
                    "for each"
                )
                + (_NUMBERED if classes == tuple(map(str, range(len(classes)))) else "")
            )
    for source in data.there.values():
        reader = reader_of(source)
        if isinstance(reader, FileReader) and reader.files.left_out:
            notes.append(
                f"{reader.folder}: {counted(reader.files.left_out)} are left out, because their suffixes are "
                "not those of supported pictures: to use them, convert them, for example to .png"
            )
    return notes


_NUMBERED = ": integer labels stand for the classes 0 to the largest label. Number classes from 0 without gaps, or name them"
