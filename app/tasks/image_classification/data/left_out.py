"""Samples that a recipe leaves out: `data.leave_out=FILE`, a text file that `samerun data check --write FILE` writes.

    train/cat/0007.jpg      a line names an image of an image folder by its path below data.path,
    train/12                and a sample of any other kind by its split and its number from 0
    # what is wrong         lines that begin with "# ", and empty ones, are skipped

The samples after one that is left out have other numbers, as if it had never been stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from app.environment.topology import listed
from app.errors import DataError
from app.files import paths
from app.tasks.image_classification.data.images import Data, Images
from app.tasks.image_classification.sections import DataRecipe


def without_left_out(splits: Data, data: DataRecipe) -> Data:
    """Return the splits without the samples that a recipe leaves out.

    Raises DataError if the file cannot be read or a name is in no split, RecipeError for a variable that is not set.
    """
    wanted = names_in(data)
    missing = set(wanted)

    def rest(_split: str, images: Images) -> Images:
        names = [images.name(place) for place in range(len(images))]
        missing.difference_update(names)
        places = np.array([place for place, name in enumerate(names) if name not in wanted], np.int64)
        labels = None if images.labels is None else images.labels[places]
        return replace(images, places=places, labels=labels, size=len(places))

    if not wanted:
        return splits
    splits = splits.changed(rest)
    if missing:
        raise DataError(
            f"data.leave_out={data.leave_out} lists {listed(sorted(missing), 5)}, and data.path={data.path} has no such "
            "samples in this recipe's splits: correct the names, or write the file again with `samerun data check --write`"
        )
    return splits


def names_in(data: DataRecipe) -> frozenset[str]:
    """Return the names in the file of a recipe; none without one. Raises as `without_left_out`."""
    if data.leave_out is None:
        return frozenset()
    file = Path(paths.filled_in("data.leave_out", data.leave_out))
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise DataError(
            f"data.leave_out={data.leave_out} cannot be read ({error.strerror}): correct the path, or write "
            "the file with `samerun data check --write`"
        ) from error
    return frozenset(line for line in lines if line.strip() and not line.startswith("# "))


def digest(data: DataRecipe) -> dict[str, str]:
    """Return a hash of what is left out, by the name of its key, whatever the file is called; nothing without a file."""
    if data.leave_out is None:
        return {}
    names = "\n".join(sorted(names_in(data))).encode("utf-8", "surrogateescape")
    return {"data.leave_out": hashlib.sha256(names).hexdigest()[:16]}


def as_text(found: Iterable[tuple[str, str]]) -> str:
    """Return the content of such a file: names, and what is wrong with each, or nothing."""
    lines = [f"# {why.splitlines()[0]}\n{name}\n" if why else f"{name}\n" for name, why in found]
    return "# samples to leave out: set data.leave_out of a recipe to this file\n" + "".join(lines)
