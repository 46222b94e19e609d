"""Splits of a recipe's data: those that it names, and those that exist under a usual name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from app.errors import DataError, RecipeError
from app.tasks.image_classification.sections import DataRecipe, Sections

T = TypeVar("T")
U = TypeVar("U")
VALIDATION_NAMES, TEST_NAMES = ("val", "valid", "validation"), ("test",)
"""Names of splits that are used without being named in the recipe."""


class NoSplitError(DataError):
    """There is no split of that name."""


class Splits(NamedTuple, Generic[T]):
    """Something for each split of a recipe's data. None: there is no such split."""

    train: T | DataError
    """The error: there is no training split, and whoever needs it raises this."""
    validation: T | None
    test: T | None

    @property
    def there(self) -> dict[str, T]:
        """The splits that exist, by name, the training split first."""
        return {name: part for name, part in self._asdict().items() if not isinstance(part, DataError | None)}

    def changed(self, change: Callable[[str, T], U]) -> Splits[U]:
        """Return the splits with each changed, given its name."""
        changed: Any = self._replace(**{name: change(name, part) for name, part in self.there.items()})  # type: ignore[arg-type]
        return changed  # type: ignore[no-any-return]


def each_split(data: DataRecipe, open_split: Callable[[str, str], T]) -> Splits[T]:
    """Open the splits that a recipe names, and those that exist under a usual name.

    `open_split` takes a name and its key in the recipe. It raises NoSplitError for a split that does not exist, which a
    validation or test split that the recipe names must not be. The training split may be missing if there is another one.
    """
    used = {data.train_split, data.validation_split, data.test_split}

    def found(given: str | None, usual: tuple[str, ...], key: str) -> T | None:
        for name in [given] if given is not None else [name for name in usual if name not in used]:
            try:
                return open_split(name, key)
            except NoSplitError as error:
                if given is not None:
                    raise DataError(str(error)) from error
        return None

    train: T | DataError
    try:
        train = open_split(data.train_split, "data.train_split")
    except NoSplitError as error:
        train = DataError(str(error))
    validation = found(data.validation_split, VALIDATION_NAMES, "data.validation_split")
    test = found(data.test_split, TEST_NAMES, "data.test_split")
    if isinstance(train, DataError) and validation is None and test is None:
        raise train
    return Splits(train, validation, test)


def data_path(recipe: Sections) -> Path:
    """Return data.path. Raises RecipeError if it is not set."""
    if recipe.data.path is None:
        or_name = ", or the name of a data set on the hub" if recipe.data.source == "huggingface" else ""
        raise RecipeError(f"data.source={recipe.data.source} needs data.path: the file or folder with all splits{or_name}")
    return Path(recipe.data.path)
