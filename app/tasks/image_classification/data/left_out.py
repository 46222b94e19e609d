"""Samples that a recipe leaves out: `data.leave_out=FILE`, a text file that `samerun data check --write FILE` writes.

    train/cat/0007.jpg      a line names a picture of an image folder by its path below data.path,
    train/12                and a sample of any other kind by its split and its number from 0
    # what is wrong         lines that begin with "# ", and empty ones, are passed over

What is left out is not there: the samples after it have other numbers, as if it had never been stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np

from app.data.samples import CHECK
from app.environment.topology import listed
from app.errors import DataError
from app.files import paths
from app.tasks.image_classification.sections import DataRecipe

T = TypeVar("T")


class UnreadableError(DataError):
    """A sample cannot be read that must be when its split is opened; `name` is what `data.leave_out` calls it."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


def reading(read: Callable[[int], T], name: Callable[[int], str]) -> Callable[[int], T]:
    """Return `read`, of a sample by its number, which raises UnreadableError where it cannot."""

    def readable(index: int) -> T:
        try:
            return read(index)
        except DataError as error:
            raise UnreadableError(f"{error}. {CHECK}", name(index)) from error

    return readable


class Rest:
    """The samples of a split that are not left out."""

    def __init__(self, gone: Iterable[int] = ()) -> None:
        self.gone = np.array(sorted(gone), dtype=np.int64)
        """Their sample numbers."""
        self._before = self.gone - np.arange(len(self.gone))  # how many stay before each of them

    def place(self, index: int) -> int:
        """Return the number that a sample has in the whole split."""
        return index + int(np.searchsorted(self._before, index, side="right"))

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the rest, of those of all samples [N]."""
        return np.delete(values, self.gone) if len(self.gone) else values


ALL = Rest()


class LeftOut:
    """The names in the file of a recipe, until each is found in a split."""

    def __init__(self, data: DataRecipe) -> None:
        """Read the file. Raises DataError if it cannot be read, RecipeError for a variable that is not set."""
        self.names = names_in(data)
        self._file, self._path, self._missing = data.leave_out, data.path, set(self.names)

    def numbered(self, split: str, size: int) -> Rest:
        """Return what is left of a split whose samples have numbers."""
        return self.named((f"{split}/{number}" for number in range(size)) if self.names else ())

    def named(self, names: Iterable[str]) -> Rest:
        """Return what is left of a split whose samples have these names, in their order."""
        found = {name: number for number, name in enumerate(names) if name in self.names} if self.names else {}
        self._missing -= found.keys()
        return Rest(found.values())

    def check_found(self) -> None:
        """Raise DataError unless every name was found."""
        if self._missing:
            raise DataError(
                f"data.leave_out={self._file} lists {listed(sorted(self._missing), 5)}, and "
                f"data.path={self._path} has no such samples in this recipe's splits: correct the names, or "
                "write the file again with `samerun data check --write`"
            )


def names_in(data: DataRecipe) -> frozenset[str]:
    """Return the names in the file of a recipe; none without one. Raises as `LeftOut`."""
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
    told = [f"# {why.splitlines()[0]}\n{name}\n" if why else f"{name}\n" for name, why in found]
    return "# samples to leave out: set data.leave_out of a recipe to this file\n" + "".join(told)
