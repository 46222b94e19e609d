"""The nodes of a run meet before they start it, at the address and port where its processes will.

A node that does not come, a head that is none, and a port that is taken are named in one sentence within half a minute;
torchrun's rendezvous would wait much longer. A port derived from the job's id may be another program's: then the nodes meet at
one of the next ports, and the run uses that.

    node    TOKEN NODE_RANK NUM_NODES
    node 0  samerun-rendezvous
    node 0  VERDICT

The token, 128 random bits, keeps other programs and the nodes of other runs out. It is sent unencrypted: see
docs/network-security.md. `samerun launch` and `samerun doctor` hand it over in the environment of what they start on several
nodes. The tasks of an `srun samerun launch` have no common parent of ours: the first of them makes a file of mode 0600 in the
run folder.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import resource
import secrets
import selectors
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.environment.topology import Topology, listed
from app.errors import RunFolderError, TopologyError

TOKEN = "SAMERUN_MEETING_KEY"  # noqa: S105 - the name of a variable
"""Variable: the token, 32 hexadecimal digits. A user who starts every node by hand may set one, `openssl rand -hex 16`."""
PATIENCE_S = 30.0
"""Longest time that a node waits for node 0, and node 0 for all others."""
_GREETING = "samerun-rendezvous"
_PORTS = 16
"""Ports that are tried in turn. Each job has its own range, so the next ports seldom belong to another job."""
_VISIT_S = 5.0
"""How long a connection may take to send the token, and node 0 to answer."""
_STRANGERS = 256
"""Connections at a time that have not sent the token; if there are more, the oldest is closed."""
_WRITTEN_WITHIN_S = 5.0
"""Longest time between the appearance of the token's file and of its content."""
_LINE_BYTES = 200
_COMPLETE, _STRANGER = "all nodes are here", "without the token"


@dataclass(frozen=True)
class Token:
    """What the nodes of a run share."""

    secret: str = field(repr=False)
    origin: str
    """For messages: `SAMERUN_MEETING_KEY`, or the file."""
    file: Path | None = None
    """To be removed when the nodes have met."""


def new_token() -> dict[str, str]:
    """Return the variable with a new token, for the environment of what is started on the nodes."""
    return {TOKEN: secrets.token_hex(16)}


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the token, for what does not meet."""
    return {name: value for name, value in environment.items() if name != TOKEN}


def find_token(environment: Mapping[str, str], run_dir: str | None, job: str) -> Token:
    """Return the token of the environment, or else that of the job in the run folder, made now unless another node has.

    Raises TopologyError where there is none, and RunFolderError where its file cannot be made or trusted.
    """
    if TOKEN in environment:
        if not re.fullmatch("[0-9a-f]{32}", environment[TOKEN]):
            length = len(environment[TOKEN])
            raise TopologyError(f"{TOKEN} has {length} characters: it must be 32 hexadecimal digits, 0-9 and a-f")
        return Token(environment[TOKEN], TOKEN)
    if run_dir is None:
        raise TopologyError(
            "the nodes of this run have no shared key: give all nodes the same --run-dir, in a folder that "
            f"all can read, or the same {TOKEN} (`openssl rand -hex 16`)"
        )
    file = Path(run_dir) / f".meeting-{job}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # made by another node: O_EXCL holds on NFS as well
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, secrets.token_hex(16).encode())
            os.close(descriptor)
        return Token(_read(file), str(file), file)
    except OSError as error:
        raise RunFolderError(
            f"{file}, the shared key of the nodes of this run, cannot be created or read ({error.strerror}): "
            "choose another --run-dir, or let `samerun launch` call srun itself"
        ) from error


def _read(file: Path) -> str:
    end_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        # A link is not followed, and a pipe not waited for.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            status, text = os.fstat(opened.fileno()), opened.read(100).decode(errors="replace")
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RunFolderError(
                f"{file} is not a file that only you can read and write ({stat.filemode(status.st_mode)}, of user "
                f"{status.st_uid}): somebody else may have put it there. Remove it, and choose a --run-dir of your own"
            )
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
        if time.monotonic() > end_s:
            raise RunFolderError(f"{file} does not contain a key: remove it and start again")
        time.sleep(0.1)


def meet(topology: Topology, token: Token, *, timeout_s: float = PATIENCE_S, only_port: bool = False) -> int:
    """Wait until every node has reached node 0, and return the port where they met, free again.

    It is the topology's or, unless `only_port`, one of the next. Raises TopologyError on all nodes, naming those that did not
    come.
    """
    step = 1 if topology.port + _PORTS <= 2**16 else -1
    ports = [topology.port + step * offset for offset in range(1 if only_port else _PORTS)]
    if topology.node_rank != 0:
        return _reach_head(topology, ports, token, timeout_s)
    try:
        return _await_others(topology, ports, token, timeout_s)
    finally:
        if token.file is not None:
            with suppress(OSError):  # it holds nothing that another start could not use
                token.file.unlink(missing_ok=True)


@dataclass(eq=False)
class _Visitor:
    connection: socket.socket
    deadline_s: float
    received: bytes = b""
    node_rank: int | None = None
    """None until it has sent the token."""


def _await_others(  # noqa: C901, PLR0912 - the whole meeting in one view
    topology: Topology, ports: Sequence[int], token: Token, timeout_s: float
) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < topology.num_nodes + 2 * _STRANGERS:  # Linux allows 1024 open files, or as many more as a program asks for
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    missing, refused, end_s = set(range(1, topology.num_nodes)), 0, time.monotonic() + timeout_s
    visitors: list[_Visitor] = []  # in the order of arrival
    with _listen(topology, ports) as listener, selectors.DefaultSelector() as selector:
        port: int = listener.getsockname()[1]
        selector.register(listener, selectors.EVENT_READ)

        def close(visitor: _Visitor) -> None:
            selector.unregister(visitor.connection)
            visitor.connection.close()
            visitors.remove(visitor)

        try:
            while missing and time.monotonic() < end_s:
                for ready, _ in selector.select(0.1):
                    visitor = ready.data
                    if visitor is None:
                        with suppress(OSError):  # it has hung up already
                            visitors.append(_Visitor(listener.accept()[0], time.monotonic() + _VISIT_S))
                            visitors[-1].connection.settimeout(_VISIT_S)
                            selector.register(visitors[-1].connection, selectors.EVENT_READ, visitors[-1])
                    elif visitor.node_rank is not None:  # a node says nothing more, so it has ended
                        missing.add(visitor.node_rank)
                        close(visitor)
                    elif verdict := _recognize(visitor, token, topology.num_nodes, missing):
                        refused += verdict == _STRANGER
                        close(visitor)
                strangers = [visitor for visitor in visitors if visitor.node_rank is None]
                for place, visitor in enumerate(strangers):
                    if visitor.deadline_s < time.monotonic() or len(strangers) - place > _STRANGERS:
                        refused += 1
                        close(visitor)
            refused += sum(visitor.node_rank is None for visitor in visitors)
            verdict = _missing_sentence(topology, token, missing, refused, timeout_s) if missing else _COMPLETE
            for visitor in visitors:
                if visitor.node_rank is not None:
                    _send(visitor, verdict)
        finally:
            for visitor in [*visitors]:
                close(visitor)
    if missing:
        raise TopologyError(verdict)
    return port


def _recognize(visitor: _Visitor, token: Token, num_nodes: int, missing: set[int]) -> str:
    """Read what a visitor sends; return why it is refused, empty if it is a node of the run or has not sent its line yet."""
    try:
        data = visitor.connection.recv(_LINE_BYTES)
    except OSError:
        data = b""
    visitor.received += data
    if data and not data.endswith(b"\n") and len(visitor.received) < _LINE_BYTES:
        return ""
    words = visitor.received.decode(errors="replace").split()
    if len(words) != 3 or not hmac.compare_digest(words[0].encode(), token.secret.encode()):
        return _STRANGER
    rank, its_num_nodes = int(words[1]), int(words[2])
    _send(visitor, _GREETING)
    refusal = ""
    if its_num_nodes != num_nodes or not 0 < rank < num_nodes:
        refusal = f"node 0 starts a run on {num_nodes} nodes, but this is node {rank} of {its_num_nodes}"
    elif rank not in missing:
        refusal = f"node {rank} has already joined: two nodes were started with the same node rank"
    if refusal:
        _send(visitor, refusal)
    else:
        visitor.node_rank = rank
        missing.remove(rank)
    return refusal


def _send(visitor: _Visitor, line: str) -> None:
    with suppress(OSError):  # it has ended
        visitor.connection.sendall(f"{line}\n".encode())


def _missing_sentence(topology: Topology, token: Token, missing: set[int], refused: int, timeout_s: float) -> str:
    names = [_name(topology, rank) for rank in sorted(missing)]
    strangers = f"; {refused} without the key of {token.origin} were refused" if refused else ""
    return (
        f"{listed(names)} did not reach node 0 in {timeout_s:.0f} s ({topology.described('head_address')}, "
        f"{topology.described('port')}{strangers}): check its output, or exclude it (under Slurm: "
        f"--exclude={','.join(names)})"
    )


def _listen(topology: Topology, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=max(topology.num_nodes, _STRANGERS))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise TopologyError(f"{topology.described('port')} cannot be listened at: {error.strerror}") from error
    upto = f", and so are all up to {ports[-1]}," if len(ports) > 1 else ""
    raise TopologyError(
        f"{topology.described('port')} is in use{upto} on {_name(topology, 0)}, node 0: choose a free one with --port N"
    )


def _reach_head(topology: Topology, ports: Sequence[int], token: Token, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        why: OSError | None = None
        for port in ports:
            try:
                with socket.create_connection((topology.head_address, port), timeout=_VISIT_S) as head:
                    head.sendall(f"{token.secret} {topology.node_rank} {topology.num_nodes}\n".encode())
                    if _line(head, _VISIT_S) != _GREETING:
                        raise ConnectionError(f"what listens there is not node 0, or does not know the key of {token.origin}")
                    verdict = _line(head, timeout_s + _VISIT_S)  # node 0 may have begun to wait just now
            except ConnectionError as error:  # not there yet, or not node 0
                why = why or error
            except OSError as error:  # no such name, no route: it is the same with the other ports
                why = error
                break
            else:
                if verdict == _COMPLETE:
                    return port
                if not verdict:
                    verdict = f"node 0, {topology.head_address}, ended before all nodes had joined: check its output"
                raise TopologyError(verdict)
        if time.monotonic() > deadline_s:
            raise TopologyError(
                f"{socket.gethostname()}, node {topology.node_rank}, cannot reach node 0 in {timeout_s:.0f} "
                f"s: {topology.described('head_address')}, {topology.described('port')}, {why}. If nodes have "
                "other names in the fast network, set SAMERUN_HOST_SUFFIX; if a firewall blocks the port, "
                "choose another --port"
            ) from why
        time.sleep(0.2)


def _line(head: socket.socket, timeout_s: float) -> str:
    """Return the next line of node 0, byte by byte; an empty one if it has not come in time, is too long, or never will."""
    end_s, line = time.monotonic() + timeout_s, b""
    with suppress(OSError):
        while len(line) < 2**16 and (left_s := end_s - time.monotonic()) > 0:
            head.settimeout(left_s)
            byte = head.recv(1)
            if byte == b"\n":
                return line.decode(errors="replace")
            if not byte:
                break
            line += byte
    return ""


def _name(topology: Topology, node_rank: int) -> str:
    return topology.hosts[node_rank] if topology.hosts else f"node {node_rank}"
