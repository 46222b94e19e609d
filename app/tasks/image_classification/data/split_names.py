"""Which splits there are: those that a recipe names, and those that are there under a usual name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app.errors import DataError
from app.tasks.image_classification.data.source import Data, Source
from app.tasks.image_classification.sections import DataRecipe

T = TypeVar("T")

VALIDATION_NAMES = ("val", "valid", "validation")
TEST_NAMES = ("test",)


class NoSplitError(DataError):
    """There is no split of that name."""


def each_split(data: DataRecipe, open_split: Callable[[str, str], T]) -> tuple[T, T | None, T | None]:
    """Return the training, the validation and the test split; None: there is none, and the recipe names none.

    `open_split` takes a name and the recipe's key that it is of. It raises NoSplitError for a name that is not there, which a
    split that the recipe names must be.
    """
    used = {data.train_split, data.validation_split, data.test_split}

    def named(name: str, key: str) -> T:
        try:
            return open_split(name, key)
        except NoSplitError as error:
            raise DataError(str(error)) from error

    def found(given: str | None, usual: tuple[str, ...], key: str) -> T | None:
        if given is not None:
            return named(given, key)
        for name in usual:
            if name not in used:
                try:
                    return open_split(name, key)
                except NoSplitError:
                    continue
        return None

    return (
        named(data.train_split, "data.train_split"),
        found(data.validation_split, VALIDATION_NAMES, "data.validation_split"),
        found(data.test_split, TEST_NAMES, "data.test_split"),
    )


def sources(parts: tuple[T, T | None, T | None], make: Callable[[T, bool], Source]) -> Data:
    """Return the splits that `make` makes of what was opened, told whether it is for training."""
    train, validation, test = parts
    return Data(
        make(train, True),
        None if validation is None else make(validation, False),
        None if test is None else make(test, False),
    )
