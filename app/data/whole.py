"""Folders that appear under their final name only when they are complete."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder` to fill, and rename it when the block is done; remove it if the block fails.

    Raises OSError: FileExistsError if there is a `folder` when the block is done, which stays as it is.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_remains(folder: Path) -> None:
    """Remove what killed processes had made of `folder`. Nobody may be making it meanwhile."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
