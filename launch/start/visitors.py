"""The connections to node 0 before a run: its nodes, which prove that they have the run's key, and strangers.

Each side draws a number and is answered with its HMAC under the key, so the key itself is never sent, and what was said to one
is of no use to another. Every visitor has some seconds to prove itself, beside all others, and is turned away else.

    node    samerun-meeting NUMBER
    node 0  samerun-meeting NUMBER PROOF
    node    NODE_RANK NUM_NODES PROOF
    node 0  PROOF VERDICT
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from launch.start.meeting_key import GREETING, Sign, is_proof, signer

VISIT_S = 5.0
"""How long a visitor may take to prove itself."""
_UNPROVEN = 256
"""Unproven visitors at a time; if there are more, the oldest is refused."""
_LONGEST_LINE = 200


@dataclass
class Guests:
    """Who has come to node 0."""

    missing: set[int]
    """Node ranks of those who are not here."""
    gone: set[int] = field(default_factory=set)
    """Of those, who were here."""
    strangers: int = 0
    """Visitors without the key."""


def receive(
    listener: socket.socket, secret: bytes, num_nodes: int, *, timeout_s: float, verdict: Callable[[Guests], str]
) -> Guests:
    """Wait for the other nodes of the run, tell those who came the verdict on who did, and return that."""

    async def hold() -> Guests:
        return await _Reception(secret, num_nodes).hold(listener, timeout_s, verdict)

    return asyncio.run(hold())


class _Reception:
    def __init__(self, secret: bytes, num_nodes: int) -> None:
        self._secret, self._num_nodes = secret, num_nodes
        self._guests = Guests(set(range(1, num_nodes)))
        self._are_all_here = asyncio.Event()
        self._verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._visits: dict[asyncio.Task[None], bool] = {}  # in the order of arrival: whether it is a node's

    async def hold(self, listener: socket.socket, timeout_s: float, verdict: Callable[[Guests], str]) -> Guests:
        backlog = max(self._num_nodes, _UNPROVEN)
        server = await asyncio.start_server(self._begin, sock=listener, limit=_LONGEST_LINE, backlog=backlog)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._are_all_here.wait(), timeout_s)
        server.close()
        self._verdict.set_result(verdict(self._guests).replace("\n", " "))
        for visit in self._strangers():
            visit.cancel()
        if self._visits:
            await asyncio.wait(list(self._visits), timeout=VISIT_S)
        return self._guests

    def _strangers(self) -> list[asyncio.Task[None]]:
        return [visit for visit, is_node in self._visits.items() if not is_node]

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.ensure_future(self._visit(reader, writer))
        self._visits[visit] = False
        visit.add_done_callback(functools.partial(self._end, writer))
        if len(strangers := self._strangers()) > _UNPROVEN:
            strangers[0].cancel()

    def _end(self, writer: asyncio.StreamWriter, visit: asyncio.Task[None]) -> None:
        self._guests.strangers += not self._visits.pop(visit)
        writer.close()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            node_rank, num_nodes, sign = await asyncio.wait_for(self._recognise(reader, writer), VISIT_S)
            self._visits[_this_task()] = True
            verdict = self._refusal(node_rank, num_nodes) or await self._wait(reader, node_rank)
            writer.write(f"{sign('verdict', verdict)} {verdict}\n".encode())
            await asyncio.wait_for(writer.drain(), VISIT_S)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError):
            return  # a stranger, who is counted, or a node that has gone, which the verdict tells

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, int, Sign]:
        """Return the node rank of a visitor and how many nodes it knows of. Raises ValueError for a stranger."""
        greeting, node_number = await _line(reader, 2)
        if greeting != GREETING:
            raise ValueError(greeting)
        head_number = secrets.token_hex(16)
        sign = signer(self._secret, node_number, head_number)
        writer.write(f"{GREETING} {head_number} {sign('head')}\n".encode())
        node_rank, num_nodes, proof = await _line(reader, 3)
        if not is_proof(proof, sign("node", node_rank, num_nodes)):
            raise ValueError(proof)
        return int(node_rank), int(num_nodes), sign

    def _refusal(self, node_rank: int, num_nodes: int) -> str | None:
        """Why a node that has the key cannot take part: somebody has started too many."""
        if num_nodes != self._num_nodes or not 0 < node_rank < num_nodes:
            return f"node 0 starts a run on {self._num_nodes} nodes, but this is node {node_rank} of {num_nodes}"
        if node_rank not in self._guests.missing:
            return f"node {node_rank} has already joined: two nodes were started with the same node rank"
        return None

    async def _wait(self, reader: asyncio.StreamReader, node_rank: int) -> str:
        """Return the verdict when there is one. Raises EOFError if the node has gone before."""
        self._guests.missing.discard(node_rank)
        self._guests.gone.discard(node_rank)
        if not self._guests.missing:
            self._are_all_here.set()
        going = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((going, self._verdict), return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if not self._verdict.done():
            self._guests.missing.add(node_rank)
            self._guests.gone.add(node_rank)
            raise EOFError
        return self._verdict.result()


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _line(reader: asyncio.StreamReader, words: int) -> list[str]:
    """Return the words of the next line. Raises ValueError for another number of them, and EOFError for none."""
    line = (await reader.readline()).decode()
    found = line.split()
    if not line.endswith("\n") or len(found) != words:
        raise ValueError(line)
    return found
