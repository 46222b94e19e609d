"""The nodes of a run meet: each is a thread here, at a real port, and so are the strangers."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
from processes import free_port

from app.environment.topology import Topology
from app.errors import RunFolderError, TopologyError
from launch.start import rendezvous
from launch.start.rendezvous import TOKEN, Token, find_token, meet, new_token, without_token

SHARED = Token("0" * 32)
NODES = ThreadPoolExecutor(8)


class Meeting:
    """Nodes of one run, each a thread of this process."""

    def __init__(self, num_nodes: int, *, timeout_s: float = 20, port: int = 0, token: Token = SHARED) -> None:
        head, names = socket.gethostname(), tuple("abcdef"[:num_nodes])
        self.topology = Topology(num_nodes=num_nodes, head_address=head, port=port or free_port(), hosts=names)
        self.timeout_s, self.token = timeout_s, token
        self._nodes: dict[int, Future[str]] = {}

    def _attend(self, node_rank: int) -> str:
        try:
            port = meet(replace(self.topology, node_rank=node_rank), self.token, timeout_s=self.timeout_s)
        except TopologyError as error:
            return str(error)
        return f"met at {port - self.topology.port}"

    def start(self, *node_ranks: int) -> None:
        for node_rank in node_ranks:
            self._nodes[node_rank] = NODES.submit(self._attend, node_rank)
            time.sleep(0.05)

    def hold(self, *node_ranks: int) -> dict[int, str]:
        """Start these nodes too, and return the results of all."""
        self.start(*node_ranks)
        return {node_rank: node.result(30) for node_rank, node in self._nodes.items()}

    def call(self) -> socket.socket:
        """Connect to node 0."""
        return socket.create_connection((self.topology.head_address, self.topology.port), timeout=10)

    def send(self, line: str) -> str:
        """Send node 0 a line and return all that it answers."""
        with self.call() as connection:
            connection.sendall(f"{line}\n".encode())
            return connection.makefile().read()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_meet_whoever_comes_first(order):
    assert Meeting(3).hold(*order) == {0: "met at 0", 1: "met at 0", 2: "met at 0"}


def test_nodes_that_do_not_come_are_named_everywhere():
    said = Meeting(4, timeout_s=1).hold(0, 2)
    assert set(said) == {0, 2}
    for sentence in said.values():
        assert re.match(r"b, d did not reach .* or exclude it \(under Slurm: --exclude=b,d\)$", sentence)


def test_a_node_with_another_key_is_named_on_both_sides():
    said = Meeting(2, timeout_s=1)
    said.start(0)
    said.token = Token("1" * 32)
    sentences = said.hold(1)
    assert sentences[0].startswith("b did not reach node 0 in 1 s")
    assert f"what listens there is no node of a run with this {TOKEN}: give all nodes the same" in sentences[1]


# Strangers -----------------------------------------------------------------------------------------------------------------


def test_a_thousand_silent_chatty_and_slow_strangers_keep_no_node_waiting():
    meeting = Meeting(3)
    meeting.start(0)
    assert meeting.send(f"{'1' * 32} 1 3") == meeting.send(f"{SHARED.secret} 1") == ""
    began_s = time.monotonic()
    with ExitStack() as stack:
        for number in range(1000):
            stranger = stack.enter_context(meeting.call())
            if number % 3:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50 if number % 3 == 1 else SHARED.secret[:9].encode())
            if number == 800:
                meeting.start(1)
        assert meeting.hold(2) == dict.fromkeys(range(3), "met at 0")
        assert time.monotonic() - began_s < 10


def test_who_does_not_belong_here_is_turned_away(monkeypatch):
    monkeypatch.setattr(rendezvous, "_VISIT_S", 0.5)
    meeting = Meeting(3)
    meeting.start(0)
    with meeting.call() as silent, meeting.call() as node:
        node.sendall(f"{SHARED.secret} 1 3\n".encode())
        assert node.makefile().readline() == "samerun-rendezvous\n"
        assert silent.recv(1) == b""
        for numbers in ("1 3", "7 3", "2 4"):
            refusal = f"3 nodes and does not expect node {numbers.replace(' ', ' of ')}: another node has this node rank, or"
            assert refusal in meeting.send(f"{SHARED.secret} {numbers}")
        assert meeting.hold(2) == {0: "met at 0", 2: "met at 0"}
        assert node.makefile().readline() == "all nodes are here\n"


# The token -----------------------------------------------------------------------------------------------------------------


def test_tasks_without_a_common_parent_share_a_token_in_the_run_folder(tmp_path):
    run_dir = str(tmp_path / "runs" / "new")
    with ThreadPoolExecutor(8) as tasks:
        tokens = list(tasks.map(lambda _: find_token({}, run_dir, "22.0"), range(8)))
    assert len(set(tokens)) == 1
    file = tokens[0].file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Meeting(2, token=tokens[0]).hold(1, 0) == {0: "met at 0", 1: "met at 0"}
    assert list(file.parent.iterdir()) == []  # nobody needs it any more
    assert find_token({}, run_dir, "22.0") != tokens[0]


def test_the_launchers_key_goes_before_and_is_another_each_time():
    one = new_token()
    assert one != new_token()
    found = find_token(one, None, "")
    assert found.secret == one[TOKEN]
    assert one[TOKEN] not in repr(found)
    assert without_token({**one, "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [({}, "the same --run-dir, .* or the same SAMERUN_MEETING_KEY"), ({TOKEN: "secret"}, "is not 32 hexadecimal digits")],
)
def test_no_key_is_one_sentence(environment, words):
    with pytest.raises(TopologyError, match=words):
        find_token(environment, None, "")


@pytest.mark.parametrize("kind", ["open", "pipe", "link", "empty", "of another user"])
def test_a_key_that_another_user_may_know_is_refused(tmp_path, kind):
    file = tmp_path / ".meeting-22"
    if kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "link":
        file.symlink_to("known")
        file = tmp_path / "known"
    if kind != "pipe":
        file.touch(0o600)
        file.write_text("" if kind == "empty" else "0" * 32)
    if kind == "open":
        file.chmod(0o644)
    elif kind == "of another user":
        if os.geteuid() != 0:
            pytest.skip("needs root, to give a file to another user")
        os.chown(file, 65534, 65534)
    with pytest.raises(RunFolderError, match=r"\.meeting-22.*choose another --run-dir"):
        find_token({}, str(tmp_path), "22")


def test_a_head_that_has_no_address_is_named():
    topology = Topology(num_nodes=2, node_rank=1, head_address="no-such-host.invalid", port=free_port())
    with pytest.raises(
        TopologyError, match=r"node 1, cannot reach node 0 in .* is 'no-such-host.invalid'.*SAMERUN_HOST_SUFFIX"
    ):
        meet(topology, SHARED, timeout_s=0.5)


def test_two_runs_at_one_port_do_not_take_each_others_nodes():
    one = Meeting(2)
    other = Meeting(2, port=one.topology.port, token=Token("1" * 32))
    one.start(0), other.start(0)
    met = [set(meeting.hold(1).values()) for meeting in (one, other)]
    assert met == [{"met at 0"}, {"met at 1"}]
