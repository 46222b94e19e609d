"""Work that is done once before training: by one process of a node, spread over processes, with a progress bar.

Where nodes share a disk they take turns as well, if its file system has locks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
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
from app.files import paths

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
    begin_with = (work, os.getpid())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=_begin, initargs=begin_with)
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


def _begin(work: Callable[[range], Any], parent_pid: int) -> None:
    global _work  # noqa: PLW0603 - what a fork inherits needs no pickling, and a pool hands on only what can be pickled
    _work = work
    if "torch" in sys.modules:  # texts are read without it
        sys.modules["torch"].set_num_threads(1)
    # A process of a pool waits for work for ever when the one that made the pool is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was killed before
        os._exit(1)


def _do(piece: range) -> Any:
    return _work(piece)


@contextmanager
def progress(doing: str, total: int, unit: str, *, after_s: float = 2.0) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts what is done of `total`; work that is over within `after_s` seconds is not shown.

    `unit` is "bytes", or a noun in the plural. A terminal shows a bar, a log file a line.
    """
    start_s, done = time.perf_counter(), 0
    bar: Any = None

    def advance(count: int) -> None:
        nonlocal bar, done
        done += count
        if bar is None and time.perf_counter() - start_s >= after_s:
            bar = _bar(doing, total, unit)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    advance(0)
    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _bar(doing: str, total: int, unit: str) -> Any:
    # Not at the top: worker processes, and runs that find everything made, do without.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # `samerun launch` reads the stderr of a run: there the terminal is stdout.
    console = Console(stderr=sys.stderr.isatty())
    if not console.is_terminal:
        sys.stderr.write(f"{doing}: {f'{total / 1e9:.2f} GB' if unit == 'bytes' else f'{total:,} {unit}'}\n")
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = TextColumn(doing), BarColumn(), count, TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    bar.add_task(doing, total=total)
    bar.start()
    return bar


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""


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
            if error.errno not in NO_LOCKS:
                raise
        yield


def cache_folder(kind: str) -> Path:
    """Return this user's folder for what can be made again: in $SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun.

    Raises OSError if it cannot be made, or another user has made it.
    """
    cache = os.environ.get("SAMERUN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "samerun")
    return paths.own_folder(Path(cache).expanduser() / kind)
