"""Work that is done once before training: by one process of a node, spread over processes, with a progress bar.

Where nodes share a disk they take turns as well, if its file system has locks.

Another user who makes a folder of a predictable name, in /tmp for instance, could supply data, hold a lock, or redirect writes
by a link. So such a folder belongs to this user, or it is not used.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from app.errors import DataError

R = TypeVar("R")
# Pieces that are worked on or wait for their turn, by process: more would only take memory.
_AHEAD = 3
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
_work: Callable[[range], Any]


def in_order(work: Callable[[range], R], size: int, *, piece: int, processes: int) -> Iterator[R]:
    """Yield what `work` returns for each piece of 0 .. size - 1, in order; a single process is this one.

    Results are pickled; each process has one thread. Raises DataError if a process was killed, and what `work` raises.
    """
    pieces = (range(start, min(start + piece, size)) for start in range(0, size, piece))
    if processes == 1:
        yield from map(work, pieces)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=(work,))
    try:
        waiting: deque[Future[R]] = deque(pool.submit(_do, part) for part in itertools.islice(pieces, _AHEAD * processes))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(_do, part) for part in itertools.islice(pieces, 1))
            yield result
    except BrokenProcessPool as error:
        raise DataError(f"one of {processes} processes was killed, perhaps out of memory; use fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[range], Any]) -> None:
    global _work  # noqa: PLW0603 - what a fork inherits needs no pickling, and a pool hands on only what can be pickled
    _work = work
    if "torch" in sys.modules:  # texts are read without it
        sys.modules["torch"].set_num_threads(1)
    # A process of a pool waits for work for ever when the one that made the pool is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _do(piece: range) -> Any:
    return _work(piece)


_SHOWN_AFTER_S = 2.0


@contextmanager
def progress(doing: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts what is done of `total`; work that is over within two seconds is not shown.

    `unit` is "bytes", or a noun in the plural. A terminal shows a bar, a log file a line.
    """
    # Not at the top: worker processes, and runs that find everything made, do without.
    from rich.console import Console
    from rich.progress import Progress

    # `samerun launch` reads the stderr of a run: there the terminal is stdout.
    console = Console(stderr=sys.stderr.isatty())
    bar, start_s, is_shown = Progress(console=console), time.perf_counter(), False
    task = bar.add_task(doing, total=total)

    def advance(count: int) -> None:
        nonlocal is_shown
        bar.advance(task, count)
        if not is_shown and time.perf_counter() - start_s >= _SHOWN_AFTER_S:
            is_shown = True
            if console.is_terminal:
                bar.start()
            else:
                sys.stderr.write(f"{doing}: {f'{total / 1e9:.2f} GB' if unit == 'bytes' else f'{total:,} {unit}'}\n")

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def one_process_per_node(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the file `lock`, and hold it; its folder is made. Raises OSError.

    Without locks no process waits: what is made under them is renamed, so that at worst it is made twice.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # as Lustre mounted without `flock`
                raise
        yield


def cache_folder(kind: str) -> Path:
    """Return this user's folder for what can be made again: in $SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun.

    Raises OSError if it cannot be made, or another user has made it.
    """
    cache = os.environ.get("SAMERUN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "samerun")
    return own_folder(Path(cache).expanduser() / kind)


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
