"""Which splits there are: those that a recipe names, and those that are there under a usual name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.errors import DataError
from app.tasks.image_classification.data.source import Data, NoTraining, Source
from app.tasks.image_classification.sections import DataRecipe

T = TypeVar("T")

VALIDATION_NAMES = ("val", "valid", "validation")
TEST_NAMES = ("test",)


class NoSplitError(DataError):
    """There is no split of that name."""


@dataclass(frozen=True)
class Splits(Generic[T]):
    """What was opened of each split. None: there is none, and the recipe names none."""

    train: T | NoTraining
    validation: T | None
    test: T | None

    @property
    def there(self) -> list[T]:
        """Those that there are, one at least, that for training first."""
        return [part for part in (self.train, self.validation, self.test) if not isinstance(part, NoTraining | None)]


def each_split(data: DataRecipe, open_split: Callable[[str, str], T]) -> Splits[T]:
    """Return the training, the validation and the test split.

    `open_split` takes a name and the recipe's key that it is of. It raises NoSplitError for a name that is not there, which
    a validation or test split that the recipe names must be. That for training may be missing where there is another one.
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

    train: T | NoTraining
    try:
        train = open_split(data.train_split, "data.train_split")
    except NoSplitError as error:
        train = NoTraining(DataError(str(error)))
    splits = Splits(
        train,
        found(data.validation_split, VALIDATION_NAMES, "data.validation_split"),
        found(data.test_split, TEST_NAMES, "data.test_split"),
    )
    if isinstance(train, NoTraining) and not splits.there:
        raise train.why
    return splits


def sources(parts: Splits[T], make: Callable[[T, bool], Source]) -> Data:
    """Return the splits that `make` makes of what was opened, told whether it is for training."""
    train, validation, test = parts.train, parts.validation, parts.test
    return Data(
        train if isinstance(train, NoTraining) else make(train, True),
        None if validation is None else make(validation, False),
        None if test is None else make(test, False),
    )
