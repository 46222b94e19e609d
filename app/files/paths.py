"""Paths as users write them, regular files, and folders that no other user has made. Standard library only.

Whoever makes a folder of a name that can be foreseen, in /tmp for instance, could hand us data of his choice, keep us waiting
at a lock, or have us write where a link of his points. So such a folder is ours, or it is not used. Standard library only.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

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


_KINDS = {
    kind: f"it is {name}, not a file"
    for kind, name in ((stat.S_IFIFO, "a pipe"), (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"))
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, for a pipe, a socket or a device as well; its text says what that is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe that nobody writes to is opened at once
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        number, text = (errno.EISDIR, os.strerror(errno.EISDIR)) if kind == stat.S_IFDIR else (errno.EINVAL, _KINDS[kind])
        raise OSError(number, text, str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return what is in a file. Raises OSError as `opened`."""
    with open_regular(path) as file:
        return file.read()


def own_folder(folder: Path) -> Path:
    """Return the folder, which only this user can read and write from now on; it is made where there is none.

    A link is followed if it is this user's. Raises PermissionError, saying whose it is, for a folder of somebody else or one
    in which somebody else could have prepared it, and OSError where it cannot be made.
    """
    folder = folder.absolute()
    refuse_prepared(folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        refuse_prepared(folder.parent)  # it may have been prepared in the meantime
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.parent.is_dir():
            _refuse(folder, folder.lstat(), {os.geteuid()})
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _refuse(folder, status, {os.geteuid()})
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def cache_folder(kind: str, environment: Mapping[str, str]) -> Path:
    """Return this user's folder for what can be made again: in $SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun.

    Raises OSError if it cannot be made, or somebody else has made it.
    """
    said = environment.get("SAMERUN_CACHE")
    place = Path(said) if said else Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "samerun")
    return own_folder(place.expanduser() / kind)


def new_folder(path: Path) -> Path:
    """Make a folder of this name, or of this name and a number, that nobody else has made. Raises OSError."""
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
    """Raise PermissionError if a stranger has made a part of this path: one that is in a folder to which everybody can write.

    Folders of a group or of a colleague are trusted, as whoever chose the path knows them.
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
