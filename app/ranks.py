"""Agreement of all ranks: one's error becomes the same error of all, and words go round beside the training.

A thread that runs beside the training needs a group of its own (`Ranks`): with a shared one, one thread's messages could be
taken for the other's. Its words go over the CPU by gloo, since in NCCL's group every word would wait for the GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from app.errors import SamerunError


@contextmanager
def agreed(gather: Callable[[Any], list[Any]]) -> Iterator[None]:
    """Run the block on every rank and wait for all; if any raised a SamerunError, raise the first one on all.

    `gather` returns every rank's value, in their order. Without this the ranks that went well would wait for the others in
    the next collective. Other exceptions are faults of the program: they pass with their traceback and the launcher ends the
    other ranks.
    """
    mine: SamerunError | None = None
    try:
        yield
    except SamerunError as error:
        mine = error
    errors = gather(None if mine is None else (type(mine), str(mine), socket.gethostname()))
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if failed:
        kind, text, host = errors[failed[0]]
        everywhere = len(failed) == len(errors)
        raise kind(text if everywhere else f"rank {failed[0]} of {len(errors)} on {host}: {text}") from mine


class Ranks:
    """All ranks of the run, for one thread of each. They make it, and call its methods, in the same order."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = dist.new_group(backend="gloo") if several else None

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in the order of the ranks."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do as `agreed` does."""
        with agreed(self.gather):
            yield
