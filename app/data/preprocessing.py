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
from typing import Any, Literal, TypeVar

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
        raise DataError(f"one of {processes} processes was killed, perhaps for lack of memory; use fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[range], Any], parent_pid: int) -> None:
    global _work  # noqa: PLW0603 - what a fork inherits needs no pickling, and a pool hands on only what can be pickled
    _work = work
    if "torch" in sys.modules:  # texts are read without it
        sys.modules["torch"].set_num_threads(1)
    # A process of a pool waits for work for ever when the one that made the pool is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was killed before this one could ask to be told
        os._exit(1)


def _do(piece: range) -> Any:
    return _work(piece)


Unit = Literal["bytes", "folders", "images", "samples"]
_PATIENCE_S = 2.0


@contextmanager
def progress(doing: str, total: int, unit: Unit, *, after_s: float = _PATIENCE_S) -> Iterator[Callable[[int], None]]:
    """Yield what is told of more of the `total` that is done; what is over within `after_s` seconds is not shown."""
    shown = _Shown(doing, total, unit, after_s)
    try:
        yield shown.advance
    except BaseException:
        shown.close(is_done=False)
        raise
    shown.close(is_done=True)


class _Shown:
    def __init__(self, doing: str, total: int, unit: Unit, after_s: float) -> None:
        self._doing, self._total, self._unit, self._after_s = doing, total, unit, after_s
        self._began_s, self._done = time.perf_counter(), 0
        self._is_said = False
        self._bar: Any = None
        if after_s == 0:
            self._show()

    def advance(self, count: int) -> None:
        self._done += count
        if not self._is_said and time.perf_counter() - self._began_s >= self._after_s:
            self._show()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self, *, is_done: bool) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._is_said and is_done:
            sys.stderr.write(f"done in {time.perf_counter() - self._began_s:.1f} s\n")

    def _show(self) -> None:
        # Not at the top: worker processes, and runs that find everything made, do without.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._is_said = True
        # `samerun launch` reads the stderr of a run: there the terminal is stdout.
        console = Console(stderr=sys.stderr.isatty())
        is_in_bytes = self._unit == "bytes"
        if not console.is_terminal:
            amount = f"{self._total / 1e9:.2f} GB" if is_in_bytes else f"{self._total:,} {self._unit}"
            sys.stderr.write(f"{self._doing}: {amount}\n")
            return
        count = DownloadColumn() if is_in_bytes else MofNCompleteColumn()
        self._bar = Progress(TextColumn(self._doing), BarColumn(), count, TimeRemainingColumn(), console=console)
        self._bar.add_task(self._doing, total=self._total)
        self._bar.start()


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without `flock`."""


@contextmanager
def one_process_per_node(lock: Path) -> Iterator[None]:
    """Wait until no other process holds the file `lock`, and hold it; its folder is made. Raises OSError.

    Where there are no locks at all, nobody waits: what is made under them is renamed, so that at worst it is made twice.
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
    """Return `own_folder.cache_folder`, by the environment of this process."""
    return paths.cache_folder(kind, os.environ)
