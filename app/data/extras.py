"""Libraries of one kind of data: imported where that kind is opened, and not installed with the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import DataError


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Say what to install if an import in the block fails. Raises DataError."""
    try:
        yield
    except ImportError as error:
        raise DataError(f'{what} needs a library that is not installed ({error}): pip install "samerun[formats]"') from error
