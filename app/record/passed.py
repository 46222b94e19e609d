"""Which own tasks have passed `samerun parity --quick`: one empty file per task, named by a digest of its sources.

Kept with what else can be made again, for this user. Where it cannot be written or read, a task is one that has not passed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from app.data.turns import cache_folder


def remember(digest: str) -> None:
    """Keep in mind that the task with these sources has passed."""
    with suppress(OSError):
        _file(digest).touch()


def has_passed(digest: str) -> bool:
    """Whether the task with these sources has passed on this machine, or another that shares its cache."""
    with suppress(OSError):
        return _file(digest).exists()
    return False


def _file(digest: str) -> Path:
    return cache_folder("parity") / digest
