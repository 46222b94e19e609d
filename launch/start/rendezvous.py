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

import hmac
import os
import re
import resource
import secrets
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

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
_LINE_BYTES = 200
_BACKLOG = 256
_COMPLETE = "all nodes are here"


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
    file, new = Path(run_dir, f".meeting-{job}"), Path(run_dir, f".new-{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(16))
        try:
            os.link(new, file)  # it appears with its content, on NFS as well
        except FileExistsError:  # made by another node
            pass
        finally:
            new.unlink()
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
    return Token(secret, str(file), file)


def meet(topology: Topology, token: Token, *, timeout_s: float = PATIENCE_S, only_port: bool = False) -> int:
    """Wait until every node has reached node 0, and return the port where they met, free again.

    It is the topology's or, unless `only_port`, one of the next. Raises TopologyError on all nodes, naming those that did not
    come.
    """
    step = 1 if topology.port + _PORTS <= 2**16 else -1
    ports = [topology.port + step * offset for offset in range(1 if only_port else _PORTS)]
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

    missing, complete, strangers = set(range(1, topology.num_nodes)), asyncio.Event(), 0
    nodes: dict[int, asyncio.StreamWriter] = {}

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal strangers
        strangers += 1  # until it has sent the token
        rank = None
        try:
            async with asyncio.timeout(_VISIT_S):
                secret, rank_text, num_nodes = (await reader.readline()).decode(errors="replace").split()
            if not hmac.compare_digest(secret.encode(), token.secret.encode()):
                return
            strangers -= 1
            refusal = _refusal(topology, missing, int(rank_text), int(num_nodes))
            writer.write(f"{_GREETING}\n{refusal}".encode())
            if refusal:
                return
            rank = int(rank_text)
            nodes[rank] = writer
            missing.remove(rank)
            complete.set()
            await reader.read()  # a node says nothing more, so it has ended
        except (OSError, ValueError):  # it has hung up, sent nothing, or another line
            return
        finally:
            writer.close()
            if rank is not None:
                del nodes[rank]
                missing.add(rank)

    server = await asyncio.start_server(receive, sock=listener, limit=_LINE_BYTES, backlog=_BACKLOG)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while missing:
                complete.clear()
                await complete.wait()
    server.close()
    verdict = _missing_sentence(topology, token, missing, strangers, timeout_s) if missing else _COMPLETE
    for writer in nodes.values():
        writer.write(f"{verdict}\n".encode())
    return verdict


def _refusal(topology: Topology, missing: set[int], rank: int, num_nodes: int) -> str:
    """Return the line that refuses a node; empty for a node of this run."""
    if num_nodes != topology.num_nodes or not 0 < rank < num_nodes:
        return f"node 0 starts a run on {topology.num_nodes} nodes, but this is node {rank} of {num_nodes}\n"
    if rank not in missing:
        return f"node {rank} has already joined: two nodes were started with the same node rank\n"
    return ""


def _missing_sentence(topology: Topology, token: Token, missing: set[int], strangers: int, timeout_s: float) -> str:
    names = [_name(topology, rank) for rank in sorted(missing)]
    refused = f"; {strangers} without the key of {token.origin} were refused" if strangers else ""
    return (
        f"{listed(names)} did not reach node 0 in {timeout_s:.0f} s ({topology.described('head_address')}, "
        f"{topology.described('port')}{refused}): check its output, or exclude it (under Slurm: "
        f"--exclude={','.join(names)})"
    )


def _listen(topology: Topology, ports: Sequence[int]) -> socket.socket:
    why = ""
    for port in ports:
        try:
            return socket.create_server(("", port), backlog=_BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno or 0)
    upto = f", and those up to {ports[-1]}," if len(ports) > 1 else ""
    raise TopologyError(
        f"{topology.described('port')}{upto} cannot be used on {_name(topology, 0)}, node 0 ({why}): choose another with "
        "--port N"
    )


def _reach_head(topology: Topology, ports: Sequence[int], token: Token, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        why: OSError | None = None
        for port in ports:
            try:
                with (
                    socket.create_connection((topology.head_address, port), timeout=_VISIT_S) as head,
                    head.makefile("rb") as lines,
                ):
                    verdict = _verdict(head, lines, topology, token, timeout_s)
            except ConnectionError as error:  # not there yet, or not node 0
                why = why or error
            except OSError as error:  # no such name, no route: it is the same with the other ports
                why = error
                break
            else:
                if verdict == _COMPLETE:
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


def _verdict(head: socket.socket, lines: IO[bytes], topology: Topology, token: Token, timeout_s: float) -> str:
    """Introduce this node to what may be node 0, and return its verdict. Raises ConnectionError if it is another program."""
    head.sendall(f"{token.secret} {topology.node_rank} {topology.num_nodes}\n".encode())
    try:
        greeting = lines.readline(_LINE_BYTES)
    except TimeoutError:
        greeting = b""
    if greeting != f"{_GREETING}\n".encode():
        raise ConnectionError(f"what listens there is not node 0, or does not know the key of {token.origin}")
    head.settimeout(timeout_s + _VISIT_S)  # node 0 may have begun to wait just now
    with suppress(OSError):
        if verdict := lines.readline().decode(errors="replace").strip():
            return verdict
    return f"node 0, {topology.head_address}, ended before all nodes had joined: check its output"


def _name(topology: Topology, node_rank: int) -> str:
    return topology.hosts[node_rank] if topology.hosts else f"node {node_rank}"
