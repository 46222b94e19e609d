"""Notes on the data before a run: not errors, but perhaps not what was meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.data.data_files import NotRead, read_folder
from app.environment.topology import listed
from app.tasks.image_classification.data.decoded import reader_of
from app.tasks.image_classification.data.folders import FileReader
from app.tasks.image_classification.data.open import Data

_NAMED = 5
"""Classes that are named."""


def notes_on(data: Data) -> list[str]:
    """Return a sentence for each thing that was seen: classes without a training sample, and what is not read."""
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
    return notes + not_read(data)


def not_read(data: Data) -> list[str]:
    """Return a sentence for each folder of the data in which there is something that is not read."""
    readers = [reader for reader in map(reader_of, data.there.values()) if isinstance(reader, FileReader)]
    notes = [f"{reader.folder}: {reader.files.left_out}" for reader in readers if reader.files.left_out]
    below = [Path(reader.prefix).parts for reader in readers if reader.prefix]
    if below:
        top = readers[0].folder.parents[len(below[0]) - 1]
        others = [name for name in read_folder(top, "", NotRead()).folders if name not in {parts[0] for parts in below}]
        if others:
            notes.append(f"{top}: no split of the recipe reads {listed(others, _NAMED)}")
    return notes


_NUMBERED = ": integer labels stand for the classes 0 to the largest label. Number classes from 0 without gaps, or name them"
