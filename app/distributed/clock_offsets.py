"""How far the clocks of other hosts are from rank 0's, from the moments at which all ranks meet.

Nobody leaves a meeting before everybody has come. If rank i left at `out_i` by its clock and rank 0 came at `in_0` by its own,
then rank i's clock is ahead by no more than `out_i - in_0`; and by no less than `in_i - out_0`. Every meeting gives such
bounds, and the narrowest hold: the error is at most half their distance, whatever the network does (as in F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989, with a collective for the message).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.distributed.runtime import Runtime

_MEETINGS = 20
"""Enough for one in which nobody was late: a few milliseconds through gloo."""


@dataclass(frozen=True)
class Offset:
    """How far a clock is ahead of rank 0's, in nanoseconds: `ahead_ns`, give or take `error_ns`."""

    ahead_ns: float
    error_ns: float


@dataclass(frozen=True)
class Bounds:
    """How far the clock of a rank on `host` is ahead of rank 0's, at least and at most, in nanoseconds."""

    host: str
    least_ns: float
    most_ns: float


def compare(runtime: Runtime, zero_ns: int) -> Offset:
    """Return how far this host's clock is ahead of rank 0's. All ranks call this.

    `zero_ns` is a Unix time a short while ago, the same on all ranks.
    """
    launched = runtime.launched
    own = bounds(
        runtime.greatest,
        lambda: time.time_ns() - zero_ns,
        host=socket.gethostname(),
        rank=launched.rank,
        world_size=launched.world_size,
    )
    return offset(launched.rank, runtime.gather(own))


def bounds(meet: Callable[[Sequence[float]], list[float]], now_ns: Callable[[], int], *, host: str, rank: int,
           world_size: int) -> Bounds:  # fmt: skip
    """Return this rank's bounds. `meet` returns the greatest of all ranks' values, place by place; all ranks call this.

    `now_ns` is the clock of `host`, in nanoseconds, small enough for a float64 to hold exactly.
    """
    most_ns, least_of_all_ns = math.inf, [-math.inf] * world_size
    for _ in range(_MEETINGS):
        came: list[float] = [-math.inf] * world_size
        came[rank] = now_ns()
        came = meet(came)
        left_ns = now_ns()
        most_ns = min(most_ns, left_ns - came[0])
        if rank == 0:
            least_of_all_ns = [max(least, there - left_ns) for least, there in zip(least_of_all_ns, came, strict=True)]
    return Bounds(host, meet(least_of_all_ns)[rank], most_ns)


def offset(rank: int, of_all: Sequence[Bounds]) -> Offset:
    """Return the offset of a rank's clock, from the bounds of all: the ranks of one host have one clock.

    Those on rank 0's host have its clock, without error. Bounds that contradict each other, because a clock was set in
    between, give an error that says how far they do.
    """
    host = of_all[rank].host
    if host == of_all[0].host:
        return Offset(0.0, 0.0)
    least_ns = max(one.least_ns for one in of_all if one.host == host)
    most_ns = min(one.most_ns for one in of_all if one.host == host)
    return Offset((least_ns + most_ns) / 2, abs(most_ns - least_ns) / 2)
