"""The nodes of a run meet before they start it, at the address and port where its processes will.

A node that cannot get there, a head that is none, and a port that is taken are said in one sentence within half a minute,
where torchrun's rendezvous would be waited for. A port made from the job's id may be another program's: then the nodes meet at
one of the next ports, and the run goes there.
"""

from __future__ import annotations

import errno
import resource
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from app.errors import TopologyError
from app.topology import Topology

PATIENCE_S = 30.0
"""Longest time from the first node that is ready to the last."""
_PORTS = 16
"""Ports that are tried. Jobs have ports of their own, so the next ones are seldom those of another."""
_CONNECT_S = 5.0
_ALL_HERE = "all here"


def meet(topology: Topology, *, timeout_s: float = PATIENCE_S, only_port: bool = False) -> int:
    """Wait until every node has reached node 0, and return the port where they met, free again.

    It is the topology's or, unless `only_port`, one of the next. Raises TopologyError on all nodes, naming those that did not
    come.
    """
    ports = [topology.port] if only_port else [_next(topology.port, offset) for offset in range(_PORTS)]
    # So that the nodes of another run at the same port are not taken for ours.
    badge = zlib.crc32(repr((topology.hosts, topology.num_nodes, topology.port)).encode())
    if topology.node_rank == 0:
        return _await_others(topology, ports, badge, timeout_s)
    return _reach_head(topology, ports, badge, timeout_s)


def _next(port: int, offset: int) -> int:
    return port + offset if port + _PORTS <= 2**16 else port - offset


def _await_others(topology: Topology, ports: Sequence[int], badge: int, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    _allow_files(topology.num_nodes)
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(topology, ports))
        arrived: dict[int, socket.socket] = {}
        for node_rank, visitor in _visitors(listener, badge, deadline_s, stack):
            arrived[node_rank] = visitor
            if len(arrived) == topology.num_nodes - 1:
                break
        missing = [rank for rank in range(1, topology.num_nodes) if rank not in arrived]
        verdict = _missing_sentence(topology, missing, timeout_s) if missing else _ALL_HERE
        for visitor in arrived.values():
            visitor.sendall(verdict.encode())
        port: int = listener.getsockname()[1]
    if missing:
        raise TopologyError(verdict)
    return port


def _allow_files(connections: int) -> None:
    """Linux lets a program have 1024 open files, or as many more as it says that it needs."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < connections + 64:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(topology: Topology, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=topology.num_nodes)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise TopologyError(f"{topology.described('port')} cannot be listened at: {error.strerror}") from error
    upto = f", and so are all up to {ports[-1]}," if len(ports) > 1 else ""
    raise TopologyError(
        f"{topology.described('port')} is in use{upto} on {_name(topology, 0)}, node 0: choose a free one with --port N"
    )


def _visitors(listener: socket.socket, badge: int, deadline_s: float, stack: ExitStack) -> Iterator[tuple[int, socket.socket]]:
    """The nodes of this run that come, with their connections, until the time is over. Each is answered at once."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            visitor = stack.enter_context(listener.accept()[0])
            visitor.settimeout(2.0)
            said, node_rank = visitor.recv(64).split()
            if int(said) != badge:
                visitor.close()
                continue
            visitor.sendall(f"{badge}\n".encode())
        except (TimeoutError, ValueError, ConnectionError):  # the time is over, or somebody else called
            continue
        yield int(node_rank), visitor


def _missing_sentence(topology: Topology, missing: Sequence[int], timeout_s: float) -> str:
    names = [_name(topology, rank) for rank in missing]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{shown} did not reach node 0 in {timeout_s:.0f} s ({topology.described('head_address')}, "
        f"{topology.described('port')}): see what that says of itself, or do without (under Slurm: "
        f"--exclude={','.join(names)})"
    )


def _reach_head(topology: Topology, ports: Sequence[int], badge: int, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        why: OSError | None = None
        for port in ports:
            try:
                with socket.create_connection((topology.head_address, port), timeout=_CONNECT_S) as head:
                    verdict = _hear_verdict(head, topology, badge, deadline_s + 5)
            except ConnectionError as error:  # not there yet, or not the one that we look for
                why = why or error
            except OSError as error:  # no such name, no way: so it is with the other ports
                why = error
                break
            else:
                if verdict == _ALL_HERE:
                    return port
                raise TopologyError(verdict)
        if time.monotonic() > deadline_s:
            raise TopologyError(
                f"{socket.gethostname()}, node {topology.node_rank}, cannot reach node 0 in {timeout_s:.0f} s: "
                f"{topology.described('head_address')}, {topology.described('port')}, {why}. If nodes have other names in the "
                "fast network, set SAMERUN_HOST_SUFFIX; if a firewall is between, choose another --port"
            ) from why
        time.sleep(0.2)


def _hear_verdict(head: socket.socket, topology: Topology, badge: int, deadline_s: float) -> str:
    """Say who this is, and wait for the others. Raises ConnectionError where somebody else answers, or nobody."""
    head.settimeout(_CONNECT_S)
    head.sendall(f"{badge} {topology.node_rank}".encode())
    try:
        greeting = head.recv(64)
    except TimeoutError as error:
        raise ConnectionError("what listens there is no node of this run") from error
    greeted, _, verdict = greeting.decode(errors="replace").partition("\n")
    if greeted != str(badge):
        raise ConnectionError("what listens there is no node of this run")
    head.settimeout(max(deadline_s - time.monotonic(), 1.0))
    verdict = verdict or head.recv(2**16).decode()
    return verdict or f"node 0, {topology.head_address}, ended before all nodes were there: see what it says"


def _name(topology: Topology, node_rank: int) -> str:
    return topology.hosts[node_rank] if topology.hosts else f"node {node_rank}"
