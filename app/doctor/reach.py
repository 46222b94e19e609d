"""Which nodes can connect to which, tested for every pair in both directions before the processes form a group.

The processes of a run connect each to each, at ports that the kernel deals out. With a firewall or a wrong route between two
nodes that is waited for by all, and nobody is named. So the first process of each node listens at such a port, says where in
the store through which the processes are about to be joined, and connects to the others'. All are told what came of it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from app.doctor.diagnosis import Problem
from app.doctor.probe import address_towards
from app.environment.launched import Launched
from app.environment.topology import listed

_CONNECT_S = 5.0
"""Longest time of one connection: Linux repeats a lost first packet after 1 and 3 seconds."""
_AT_ONCE = 32
_PREFIX = "samerun-doctor"


@dataclass(frozen=True)
class BrokenLink:
    """A connection that cannot be made."""

    source: str
    """Host that tried to connect."""
    target: str
    """Host that listened."""
    why: str
    """Address and port, and what the system said."""


def examine(
    launched: Launched, head: tuple[str, int], *, interface: str | None, timeout_s: float
) -> tuple[list[str], list[BrokenLink]]:
    """Return the hosts in the order of their ranks, and every link between two of them that cannot be made, on all ranks.

    `head` is name and port of the launchers' store. The ranks use `interface`; None: the one that leads to `head`. Raises
    torch's own error if other nodes do not come within `timeout_s`.
    """
    store = dist.TCPStore(*head, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    firsts = range(0, launched.world_size, launched.local_world_size)
    if launched.local_rank != 0:
        return _told(store)
    with _listener() as listener:
        own = socket.gethostname(), _own_address(launched, head[0], interface), listener.getsockname()[1]
        _put(store, f"place/{launched.rank}", own)
        places = dict(zip(firsts, _get(store, [f"place/{rank}" for rank in firsts]), strict=True))
        _put(store, f"broken/{launched.rank}", _broken_links(launched.rank, places))
        if launched.rank == 0:
            broken = [link for links in _get(store, [f"broken/{rank}" for rank in firsts]) for link in links]
            _put(store, "verdict", [[host for host, _, _ in places.values()], broken])
        return _told(store)  # the others may be trying this one until then


def unreachable(broken: Sequence[BrokenLink], hosts: Sequence[str]) -> list[Problem]:
    """Return a problem for each of the fewest nodes, or nearly, without which all can connect to each other.

    Of two alike, the later one of `hosts`: the first is the head, which the others have reached already.
    """
    ways = {(link.source, link.target): link.why for link in broken}
    problems = []
    while ways:
        partners = {host: {end for way in ways if host in way for end in way} - {host} for host in hosts}
        blamed = max(hosts, key=lambda host: (len(partners[host]), hosts.index(host)))
        described = []
        for other in sorted(partners[blamed], key=hosts.index):
            there, back = (blamed, other) in ways, (other, blamed) in ways
            described.append(f"{other} ({'either way' if there and back else 'from it' if there else 'to it'})")
        why = next(why for way, why in ways.items() if blamed in way)
        problems.append(
            Problem(
                text=(
                    f"no connection with {listed(described)}, for example {why}. Check firewall and routes "
                    "between them; if another network connects the nodes, set GLOO_SOCKET_IFNAME and "
                    "NCCL_SOCKET_IFNAME"
                ),
                host=blamed,
            )
        )
        ways = {way: why for way, why in ways.items() if blamed not in way}
    return problems


def _told(store: dist.Store) -> tuple[list[str], list[BrokenLink]]:
    ((hosts, broken),) = _get(store, ["verdict"])
    return hosts, [BrokenLink(*link) for link in broken]


def _broken_links(rank: int, places: dict[int, Sequence[Any]]) -> list[list[str]]:
    """The links from this node to all others that cannot be made, as the fields of `BrokenLink`."""

    def why_not(other: int) -> list[str] | None:
        host, address, port = places[other]
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return [places[rank][0], host, f"{address}, port {port}: {error.strerror or error}"]
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [link for link in pool.map(why_not, [other for other in places if other != rank]) if link]


def _listener() -> socket.socket:
    """A socket at any free port of all addresses. The kernel answers by itself, for so many at a time."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _own_address(launched: Launched, head: str, interface: str | None) -> str:
    for address in psutil.net_if_addrs().get(interface or "", []):
        if address.family in (socket.AF_INET, socket.AF_INET6):
            return address.address
    return head if launched.rank == 0 else address_towards(head)


def _put(store: dist.Store, key: str, value: Any) -> None:
    store.set(f"{_PREFIX}/{key}", json.dumps(value))


def _get(store: dist.Store, keys: Iterable[str]) -> list[Any]:
    """The values of these keys, when all are there."""
    return [json.loads(value) for value in store.multi_get([f"{_PREFIX}/{key}" for key in keys])]
