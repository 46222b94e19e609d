"""What the GNU C library's malloc does with memory, through mallopt(3). With other C libraries nothing changes."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of mallopt(3) and malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6


def keep_freed(*, most_bytes: int = 32 << 20) -> None:
    """Have malloc keep what is freed for the next allocation, instead of giving it back to the system, unless it is larger.

    Tensors of some MB are mapped anew otherwise, and their pages cleared, in each operation of each step: a tenth to a quarter
    of a convolutional network's step (docs/performance.md). By default it is the largest that mallopt(3) takes.
    """
    if mallopt := _mallopt():
        mallopt(_M_MMAP_THRESHOLD, most_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Give what is free now back to the system, also between what is in use (malloc_trim(3))."""
    if _mallopt():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def filled_with(byte: int) -> Iterator[None]:
    """Have malloc fill what it gives with this byte, from 0 to 254, of more than the 1 KiB that threads keep for themselves."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, byte ^ 0xFF)  # new memory gets the complement of the number; 0 turns it off
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


def _mallopt() -> Callable[[int, int], Any] | None:
    return ctypes.CDLL(None).mallopt if platform.libc_ver()[0] == "glibc" else None
