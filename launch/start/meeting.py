"""The nodes of a run meet before they start it, at the address and port where its processes will.

A node that cannot get there, a head that is none, and a port that is taken are said in one sentence within half a minute,
where torchrun's rendezvous would be waited for. A port made from the job's id may be another program's: then the nodes meet at
one of the next ports, and the run goes there. Nodes prove to each other that they belong to the run (`meeting_key.py`), and
nobody else who listens or calls there is believed.
"""

from __future__ import annotations

import errno
import resource
import secrets
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.errors import TopologyError
from app.place.topology import Topology, listed
from launch.start.meeting_key import GREETING, Key, is_proof, signer

if TYPE_CHECKING:
    from launch.start import visitors

PATIENCE_S = 30.0
"""Longest time that a node waits for node 0, and node 0 for all others."""
_PORTS = 16
"""Ports that are tried in turn. Each job has its own range, so the next ports seldom belong to another job."""
_CONNECT_S = 5.0
ALL_HERE = "all here"
_STRANGER = "what listens there is not a node of this run"


def meet(topology: Topology, key: Key, *, timeout_s: float = PATIENCE_S, only_port: bool = False) -> int:
    """Wait until every node has reached node 0, and return the port where they met, free again.

    It is the topology's or, unless `only_port`, one of the next. Raises TopologyError on all nodes, naming those that did not
    come.
    """
    ports = [topology.port] if only_port else [_next(topology.port, offset) for offset in range(_PORTS)]
    if topology.node_rank != 0:
        return _reach_head(topology, ports, key, timeout_s)
    try:
        return _await_others(topology, ports, key, timeout_s)
    finally:
        key.remove_file()


def _next(port: int, offset: int) -> int:
    return port + offset if port + _PORTS <= 2**16 else port - offset


def _await_others(topology: Topology, ports: Sequence[int], key: Key, timeout_s: float) -> int:
    from launch.start import visitors  # its libraries take a while, and most runs have one node

    def verdict(guests: visitors.Guests) -> str:
        return _missing_sentence(topology, guests, key, timeout_s) if guests.missing else ALL_HERE

    _allow_files(topology.num_nodes)
    with _listen(topology, ports) as listener:
        port: int = listener.getsockname()[1]
        guests = visitors.receive(listener, key.secret, topology.num_nodes, timeout_s=timeout_s, verdict=verdict)
    if guests.missing:
        raise TopologyError(verdict(guests))
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


def _missing_sentence(topology: Topology, guests: visitors.Guests, key: Key, timeout_s: float) -> str:
    names = [_name(topology, rank) for rank in sorted(guests.missing)]
    gone = [_name(topology, rank) for rank in sorted(guests.gone & guests.missing)]
    left = f"; {listed(gone)} did, but ended before the others arrived" if gone else ""
    strangers = f"; {guests.strangers} without the key of {key.origin} were refused" if guests.strangers else ""
    return (
        f"{listed(names)} did not reach node 0 in {timeout_s:.0f} s ({topology.described('head_address')}, "
        f"{topology.described('port')}{left}{strangers}): check its output, or exclude it (under Slurm: "
        f"--exclude={','.join(names)})"
    )


def _reach_head(topology: Topology, ports: Sequence[int], key: Key, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        why: OSError | None = None
        for port in ports:
            try:
                with socket.create_connection((topology.head_address, port), timeout=_CONNECT_S) as head:
                    verdict = _hear_verdict(head, topology, key, timeout_s)
            except ConnectionError as error:  # not there yet, or not the one that we look for
                why = why or error
            except OSError as error:  # no such name, no way: so it is with the other ports
                why = error
                break
            else:
                if verdict == ALL_HERE:
                    return port
                raise TopologyError(verdict)
        if time.monotonic() > deadline_s:
            raise TopologyError(
                f"{socket.gethostname()}, node {topology.node_rank}, cannot reach node 0 in {timeout_s:.0f} "
                f"s: {topology.described('head_address')}, {topology.described('port')}, {why}. If nodes have "
                "other names in the fast network, set SAMERUN_HOST_SUFFIX; if a firewall blocks the port, "
                "choose another --port"
            ) from why
        time.sleep(0.2)


def _hear_verdict(head: socket.socket, topology: Topology, key: Key, timeout_s: float) -> str:
    """Prove who this is, have node 0 prove it, and wait for the others. Raises ConnectionError where somebody else answers."""
    number = secrets.token_hex(16)
    try:
        head.sendall(f"{GREETING} {number}\n".encode())
        greeting, head_number, proof = _words(head, 3, _CONNECT_S)
        if greeting != GREETING:
            raise ValueError(greeting)
    except (TimeoutError, ValueError) as error:
        raise ConnectionError(_STRANGER) from error
    sign = signer(key.secret, number, head_number)
    if not is_proof(proof, sign("head")):
        raise ConnectionError(f"{_STRANGER}, or does not know the key of {key.origin}")
    rank, num_nodes = str(topology.node_rank), str(topology.num_nodes)
    try:
        head.sendall(f"{rank} {num_nodes} {sign('node', rank, num_nodes)}\n".encode())
        proof, verdict = _words(head, 2, timeout_s + _CONNECT_S)  # node 0 may have begun to wait just now
    except (OSError, ValueError):
        return f"node 0, {topology.head_address}, ended before all nodes had joined: check its output"
    if not is_proof(proof, sign("verdict", verdict)):
        raise ConnectionError(_STRANGER)
    return verdict


def _words(head: socket.socket, number: int, timeout_s: float) -> list[str]:
    """Return the next line as so many words. Raises TimeoutError if it is not whole in time, ValueError for another line."""
    end_s, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        head.settimeout(max(end_s - time.monotonic(), 1e-3))
        piece = head.recv(2**16)
        line += piece
        if not piece or len(line) > 2**16:
            raise ValueError(line)
    words = line.decode().rstrip("\n").split(" ", number - 1)
    if len(words) != number:
        raise ValueError(line)
    return words


def _name(topology: Topology, node_rank: int) -> str:
    return topology.hosts[node_rank] if topology.hosts else f"node {node_rank}"
