"""Test which nodes can connect to each other, for every pair in both directions, before the processes form a group.

The processes of a run connect to each other at ports that the kernel assigns. If a firewall or a wrong route separates two
nodes, all ranks wait and no node is named. So the first process of each node listens at such a port, publishes its address in
the store of the launchers, and connects to the others. All ranks get the result.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from app.environment.launched import Launched
from app.environment.topology import listed

_CONNECT_S = 5.0
"""Time limit of one connection: Linux repeats a lost first packet after 1 and 3 seconds."""
_CONCURRENT = 32
Address = tuple[str, str, int]
"""Host, IP address and port."""
BrokenLinks = dict[tuple[str, str], str]
"""Why a connection failed, with address and port, by the host that tried and the host that listened."""


def find_broken_links(
    launched: Launched, head: tuple[str, int], *, interface: str | None, timeout_s: float
) -> tuple[list[str], BrokenLinks]:
    """Return the hosts in the order of their ranks, and the links between them that cannot be made. All ranks call this.

    `head` is host and port of the launchers' store. The ranks use `interface`; None: the one that leads to `head`. Raises
    torch's own error if other nodes do not come within `timeout_s`.
    """
    server = dist.TCPStore(*head, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    store = dist.PrefixStore("samerun-doctor", server)
    if launched.local_rank != 0:
        return _result(store)
    first_ranks = range(0, launched.world_size, launched.local_world_size)
    host, dual = socket.gethostname(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    # The kernel accepts connections itself, up to the backlog.
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=socket.SOMAXCONN) as listener:
        own = host, _own_address(launched, head[0], interface), listener.getsockname()[1]
        store.set(f"address/{launched.rank}", json.dumps(own))
        addresses: list[Address] = _get(store, [f"address/{rank}" for rank in first_ranks])
        others = [address for rank, address in zip(first_ranks, addresses, strict=True) if rank != launched.rank]
        broken = connect_all(host, others)
        store.set(f"broken/{launched.rank}", json.dumps(list(broken.items())))
        if launched.rank == 0:
            links = [link for part in _get(store, [f"broken/{rank}" for rank in first_ranks]) for link in part]
            store.set("result", json.dumps([[name for name, _, _ in addresses], links]))
        return _result(store)  # until then other nodes connect to this one


def connect_all(source: str, addresses: Sequence[Address]) -> BrokenLinks:
    """Connect from the host `source` to these addresses, and return what failed."""

    def attempt(address: Address) -> str:
        _, ip, port = address
        try:
            socket.create_connection((ip, port), timeout=_CONNECT_S).close()
        except OSError as error:
            return f"{ip}, port {port}: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(_CONCURRENT) as pool:
        errors = zip(addresses, pool.map(attempt, addresses), strict=True)
        return {(source, host): text for (host, _, _), text in errors if text}


def isolated_nodes(broken: Mapping[tuple[str, str], str], hosts: Sequence[str]) -> dict[str, str]:
    """Return the fewest hosts, or nearly, without which all can connect to each other, and for each what is wrong.

    Of two alike, the later one of `hosts`: the first is the head, to which the others have already connected.
    """
    links, isolated = dict(broken), {}
    while links:
        partners = {host: {end for link in links if host in link for end in link} - {host} for host in hosts}
        blamed = max(hosts, key=lambda host: (len(partners[host]), hosts.index(host)))
        described = []
        for other in sorted(partners[blamed], key=hosts.index):
            outward, inward = (blamed, other) in links, (other, blamed) in links
            described.append(f"{other} ({'either way' if outward and inward else 'from it' if outward else 'to it'})")
        example = next(error for link, error in links.items() if blamed in link)
        isolated[blamed] = (
            f"no connection with {listed(described)}, for example {example}. Check firewall and routes between them; if "
            "another network connects the nodes, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        links = {link: error for link, error in links.items() if blamed not in link}
    return isolated


def address_towards(host: str) -> str:
    """Return the IP address from which this machine sends to `host`. Nothing is sent: only a route is chosen."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as opened:
        opened.connect(there)
        return str(opened.getsockname()[0])


def _own_address(launched: Launched, head: str, interface: str | None) -> str:
    for address in psutil.net_if_addrs().get(interface or "", []):
        if address.family in (socket.AF_INET, socket.AF_INET6):
            return address.address
    return head if launched.rank == 0 else address_towards(head)


def _get(store: dist.Store, keys: Iterable[str]) -> list[Any]:
    """Wait until all keys are set, and return their values."""
    return [json.loads(value) for value in store.multi_get(list(keys))]


def _result(store: dist.Store) -> tuple[list[str], BrokenLinks]:
    ((hosts, links),) = _get(store, ["result"])
    return hosts, {(source, target): error for (source, target), error in links}
