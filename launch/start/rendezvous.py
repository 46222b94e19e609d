"""The nodes of a run meet before they start it, at the address and port where its processes will.

A node that does not come, a head that is none, and a port that is taken are named in one sentence within half a minute;
torchrun's rendezvous would wait much longer. A port derived from the job's id may be another program's: then the nodes meet at
one of the next ports, and the run uses that.

    node    TOKEN NODE_RANK NUM_NODES
    node 0  samerun-rendezvous
    node 0  VERDICT

The token, 128 random bits, keeps other programs and the nodes of other runs out. It is sent unencrypted: see
docs/pbs-mpi-ssh.md. `samerun launch` and `samerun doctor` hand it over in the environment of what they start on several
nodes. The tasks of an `srun samerun launch` have no common parent of ours: the first of them makes a file of mode 0600 in the
run folder.
"""

from __future__ import annotations

import hmac
import itertools
import os
import re
import resource
import secrets
import socket
import stat
import tempfile
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
"""Time in which a connection must send the token, and node 0 answer."""
_LINE_BYTES = 200
_BACKLOG = 256
_COMPLETE = "all nodes are here"


@dataclass(frozen=True)
class Token:
    """Values that the nodes of a run share."""

    secret: str = field(repr=False)
    file: Path | None = None
    """Removed when the nodes have met; None: the token is from the environment."""


def new_token() -> dict[str, str]:
    """Return the variable with a new token, for the environment of what is started on the nodes."""
    return {TOKEN: secrets.token_hex(16)}


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the token, for what does not meet."""
    return {name: value for name, value in environment.items() if name != TOKEN}


def find_token(environment: Mapping[str, str], run_dir: str | None, job: str) -> Token:
    """Return the token of the environment, or else the job's in the run folder, made now unless another node has.

    Raises TopologyError if the run has neither, and RunFolderError where its file cannot be made or trusted.
    """
    if TOKEN in environment:
        if not re.fullmatch("[0-9a-f]{32}", environment[TOKEN]):
            raise TopologyError(f"{TOKEN} is not 32 hexadecimal digits, 0-9 and a-f, as of `openssl rand -hex 16`")
        return Token(environment[TOKEN])
    if run_dir is None:
        raise TopologyError(
            "the nodes of this run have no shared key: give all nodes the same --run-dir, in a folder that "
            f"all can read, or the same {TOKEN} (`openssl rand -hex 16`)"
        )
    file = Path(run_dir, f".meeting-{job}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Only this user can read it. Another node may have made the token.
        with tempfile.NamedTemporaryFile("w", prefix=".new-", dir=run_dir) as new, suppress(FileExistsError):
            new.write(secrets.token_hex(16))
            new.flush()
            os.link(new.name, file)  # it appears with its content, on NFS as well
        # A link is not followed, and a pipe not waited for.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
            status, secret = os.fstat(opened.fileno()), opened.read(100)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        why = "" if is_ours and re.fullmatch("[0-9a-f]{32}", secret) else f"{stat.filemode(status.st_mode)} of {status.st_uid}"
    except (OSError, UnicodeDecodeError) as error:
        why = str(error)
    if why:
        raise RunFolderError(
            f"{file}, the shared key of the nodes of this run, cannot be used ({why}): it must be a file that only you can "
            "read and write. Remove it, choose another --run-dir, or let `samerun launch` call srun itself"
        )
    return Token(secret, file)


def meet(topology: Topology, token: Token, *, timeout_s: float = PATIENCE_S, only_port: bool = False) -> int:
    """Wait until every node has reached node 0, and return the port where they met, free again.

    It is the topology's or, unless `only_port`, one of the next. Raises TopologyError on all nodes, naming those that did not
    come.
    """
    ports = range(topology.port, min(topology.port + (1 if only_port else _PORTS), 2**16))
    if topology.node_rank != 0:
        return _reach_head(topology, ports, token, timeout_s)
    import asyncio  # not at the top: one node does not need it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # Linux allows 1024 open files, or more if a program asks for them
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with _listen(topology, ports) as listener:
            port: int = listener.getsockname()[1]
            verdict = asyncio.run(_await_others(listener, topology, token, timeout_s))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if token.file is not None:
            with suppress(OSError):  # it holds nothing that another start could not use
                token.file.unlink(missing_ok=True)
    if verdict != _COMPLETE:
        raise TopologyError(verdict)
    return port


async def _await_others(listener: socket.socket, topology: Topology, token: Token, timeout_s: float) -> str:
    """Wait for the other nodes, and send all the verdict: that they are here, or which are missing. Return it."""
    import asyncio

    missing, complete = set(range(1, topology.num_nodes)), asyncio.Event()
    nodes: list[asyncio.StreamWriter] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_VISIT_S):
                secret, rank, num_nodes = (await reader.readline()).decode(errors="replace").split()
            if not hmac.compare_digest(secret.encode(), token.secret.encode()):
                return
            writer.write(f"{_GREETING}\n".encode())
            if int(num_nodes) != topology.num_nodes or int(rank) not in missing:
                writer.write(
                    f"node 0 starts a run on {topology.num_nodes} nodes and does not expect node {rank} of {num_nodes}: "
                    "another node has this node rank, or the nodes were started for different runs\n".encode()
                )
                return
            missing.remove(int(rank))
            nodes.append(writer)
            if not missing:
                complete.set()
        except (OSError, ValueError):  # it has hung up, sent nothing, or another line
            return
        finally:
            if writer not in nodes:
                writer.close()

    server = await asyncio.start_server(receive, sock=listener, limit=_LINE_BYTES, backlog=_BACKLOG)
    with suppress(TimeoutError):
        await asyncio.wait_for(complete.wait(), timeout_s)
    server.close()
    verdict = _COMPLETE
    if missing:
        names = [topology.hosts[rank] for rank in sorted(missing)]
        verdict = (
            f"{listed(names)} did not reach node 0 in {timeout_s:.0f} s ({topology.described('head_address')}, "
            f"{topology.described('port')}): check its output, or exclude it (under Slurm: --exclude={','.join(names)})"
        )
    for writer in nodes:
        writer.write(f"{verdict}\n".encode())
        writer.close()
    return verdict


def _listen(topology: Topology, ports: Sequence[int]) -> socket.socket:
    why = ""
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=_BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno or 0)
    upto = f", and those up to {ports[-1]}," if len(ports) > 1 else ""
    raise TopologyError(
        f"{topology.described('port')}{upto} cannot be used on {topology.hosts[0]}, node 0 ({why}): choose another with "
        "--port N"
    )


def _reach_head(topology: Topology, ports: Sequence[int], token: Token, timeout_s: float) -> int:
    deadline_s, reason, tries = time.monotonic() + timeout_s, "", itertools.cycle(ports)
    while True:
        port = next(tries)
        try:
            with socket.create_connection((topology.head_address, port), _VISIT_S) as head, head.makefile("rb") as lines:
                head.sendall(f"{token.secret} {topology.node_rank} {topology.num_nodes}\n".encode())
                if lines.readline(_LINE_BYTES) != f"{_GREETING}\n".encode():
                    raise ConnectionError(f"what listens there is no node of a run with this {TOKEN}: give all nodes the same")
                head.settimeout(timeout_s + _VISIT_S)  # node 0 may have begun to wait just now
                verdict = lines.readline().decode(errors="replace").strip()
            if verdict == _COMPLETE:
                return port
            if verdict:
                raise TopologyError(verdict)
            raise ConnectionError("it ended before all nodes had joined: check its output")
        except OSError as error:
            reason = reason if reason and isinstance(error, ConnectionRefusedError) else str(error)
            if time.monotonic() > deadline_s:
                raise TopologyError(
                    f"{socket.gethostname()}, node {topology.node_rank}, cannot reach node 0 in {timeout_s:.0f} "
                    f"s: {topology.described('head_address')}, {topology.described('port')}, {reason}. If nodes have "
                    "other names in the fast network, set SAMERUN_HOST_SUFFIX; if a firewall blocks the port, "
                    "choose another --port"
                ) from error
        time.sleep(0.02)
