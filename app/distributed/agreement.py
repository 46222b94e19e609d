"""Agreement of all ranks through their hosts: exchanged text, and an error of one rank that becomes the same error on all.

They go by gloo, past the devices. In NCCL's group every word would wait for the GPU, and a rank that waits there while another
one downloads or copies data is ended after NCCL's time-out (600 s). Here a rank waits as long as the work takes: `watchdog`
decides what stands still. A thread that runs beside the training needs `Ranks` of its own: with shared ones, one thread's
messages could be taken for the other's.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from app.errors import SamerunError, TopologyError, is_of_a_lost_peer

LONGEST_WAIT = timedelta(days=1)
"""Longer than downloading, copying or decoding takes; what takes longer probably hangs."""


class Ranks:
    """All ranks of the run, for one thread of each. They make it, and call its methods, in the same order."""

    def __init__(self, *, longest_wait: timedelta = LONGEST_WAIT) -> None:
        """`longest_wait` is how long one rank may let the others wait. Raises TopologyError if they cannot meet."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = _on_hosts(longest_wait) if several else None

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in the order of the ranks."""
        if self._group is None:
            return [value]
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_main(self, value: Any) -> Any:
        """Return the picklable `value` of rank 0 on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def greatest(self, values: Sequence[float]) -> list[float]:
        """Return the greatest of the ranks' values, place by place."""
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        greatest: list[float] = tensor.tolist()
        return greatest

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the block on every rank and wait for all; if any raised a SamerunError, raise the first one on all.

        Without this the ranks that succeeded would wait for the others in the next collective. Other exceptions are faults of
        the program: they pass with their traceback and the launcher ends the other ranks.
        """
        own: SamerunError | None = None
        try:
            yield
        except SamerunError as error:
            own = error
        errors = self.gather(None if own is None else (type(own), str(own), socket.gethostname()))
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if failed:
            kind, text, host = errors[failed[0]]
            everywhere = len(failed) == len(errors)
            raise kind(text if everywhere else f"rank {failed[0]} of {len(errors)} on {host}: {text}") from own

    def leave(self) -> None:
        """Let go of the group, before torch destroys it."""
        self._group = None


def let_wait(group: Any, longest: timedelta) -> None:
    """Have the collectives of `group` wait for so long, from now on."""
    # Its name before torch 2.15.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(longest, group)


def _on_hosts(longest_wait: timedelta) -> Any:
    with connecting(dist.get_rank()):
        group = dist.new_group(backend="gloo")  # connects within torch's own time-out, however long it may wait later
    let_wait(group, longest_wait)
    return group


_REMEDIES = {
    "gloo": "GLOO_SOCKET_IFNAME names the network interface to use.",
    "NCCL": "With NCCL_DEBUG=WARN in the environment NCCL says more; NCCL_SOCKET_IFNAME names the network interface to use.",
}


@contextmanager
def connecting(rank: int) -> Iterator[None]:
    """A block in which processes connect: errors of gloo and NCCL become a TopologyError, except that another process is
    gone."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError is one
        text = str(error)
        through = next((name for name in _REMEDIES if name in text), None)
        if through is None or is_of_a_lost_peer(error):
            raise
        reason = " ".join(text.partition("\nException raised")[0].split())  # without the stack of C++ below it
        raise TopologyError(
            f"rank {rank} on {socket.gethostname()} cannot connect to the others through {through}: {reason}. "
            f"{_REMEDIES[through]}"
        ) from error
