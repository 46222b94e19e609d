"""Paths as users write them, and folders that no other user has made. Standard library only.

Another user who makes a folder of a predictable name, in /tmp for instance, could supply data, hold a lock, or redirect writes
by a link. So such a folder belongs to this user, or it is not used.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from app.errors import RecipeError


def filled_in(key: str, text: str) -> str:
    """Return the path of a recipe's key with `~` and variables replaced. Raises RecipeError for a variable that is not set."""
    filled = os.path.expandvars(Path(text).expanduser())
    missing = re.search(r"\$\{?(\w+)", filled)
    if missing:
        raise RecipeError(
            f"{key} is {text}, and the environment variable {missing[1]} is not set: set it, or write the path itself"
        )
    return filled


def own_folder(folder: Path) -> Path:
    """Return the folder, which only this user can read and write from now on; it is made if it does not exist.

    A link is followed if it is this user's. Raises PermissionError, which names the owner, for a folder of another user or one
    that another user could have prepared, and OSError where it cannot be made.
    """
    folder = folder.absolute()
    refuse_prepared(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    refuse_prepared(folder.parent)  # another user may have made it in the meantime
    folder.mkdir(mode=0o700, exist_ok=True)
    for status in (folder.lstat(), folder.stat()):
        _refuse(folder, status, {os.geteuid()})
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def new_folder(path: Path) -> Path:
    """Make a folder of this name, or of this name and a number, that did not exist. Raises OSError."""
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            if not path.parent.is_dir():  # a link that leads nowhere
                raise
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        else:
            return candidate


def refuse_prepared(folder: Path) -> None:
    """Raise PermissionError if another user has made a part of this path: one that is in a folder to which all users can write.

    Folders of a group or of a colleague are trusted, as the user who chose the path knows them.
    """
    folder = folder.absolute()
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            return
        if part.parent.stat().st_mode & stat.S_IWOTH:
            _refuse(part, part.lstat(), {os.geteuid(), 0})


def _refuse(path: Path, status: os.stat_result, owners: set[int]) -> None:
    if status.st_uid not in owners:
        what = "is a link of" if stat.S_ISLNK(status.st_mode) else "belongs to"
        raise PermissionError(errno.EPERM, f"{path} {what} user {status.st_uid}, who may have prepared it", str(path))
