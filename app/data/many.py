"""Work on many samples, spread over processes, with the results in the samples' order."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
