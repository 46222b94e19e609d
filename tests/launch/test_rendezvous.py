"""The nodes of a run meet: each is a thread here, at a real port, and so are the strangers."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from processes import free_port

from app.environment.topology import Topology
from app.errors import RunFolderError, TopologyError
from launch.start import rendezvous
from launch.start.rendezvous import TOKEN, Token, find_token, meet, new_token, without_token

SHARED = Token("0" * 32, "the test")


class Meeting:
    """Nodes of one run, each a thread of this process."""

    def __init__(self, num_nodes: int, *, timeout_s: float, head: str = "", port: int = 0) -> None:
        self.topology = Topology(
            num_nodes=num_nodes,
            head_address=head or socket.gethostname(),
            port=port or free_port(),
            hosts=tuple("abcdef"[:num_nodes]),
        )
        self.timeout_s = timeout_s
        self.token = SHARED
        self.said: dict[int, str] = {}

    def _attend(self, node_rank: int) -> None:
        topology = replace(self.topology, node_rank=node_rank)
        try:
            port = meet(topology, self.token, timeout_s=self.timeout_s)
            self.said[node_rank] = f"met at {port - self.topology.port}"
        except TopologyError as error:
            self.said[node_rank] = str(error)

    def start(self, *node_ranks: int, apart_s: float = 0) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._attend, args=(node_rank,)) for node_rank in node_ranks]
        for thread in threads:
            thread.start()
            time.sleep(apart_s)
        return threads

    def call(self) -> socket.socket:
        """Connect to node 0 as soon as it listens."""
        for _ in range(250):
            try:
                return socket.create_connection((self.topology.head_address, self.topology.port), timeout=10)
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError("nobody listens")

    def hold(self, *node_ranks: int) -> dict[int, str]:
        for thread in self.start(*node_ranks, apart_s=0.05):
            thread.join(30)
        return self.said


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_meet_whoever_comes_first(order):
    assert Meeting(3, timeout_s=20).hold(*order) == {0: "met at 0", 1: "met at 0", 2: "met at 0"}


def test_nodes_that_do_not_come_are_named_everywhere():
    said = Meeting(4, timeout_s=1).hold(0, 2)
    assert set(said) == {0, 2}
    for sentence in said.values():
        assert sentence.startswith("b, d did not reach")
        assert sentence.endswith("or exclude it (under Slurm: --exclude=b,d)")


# Strangers -----------------------------------------------------------------------------------------------------------------


def send(meeting: Meeting, line: str) -> str:
    """Send node 0 a line and return all that it answers."""
    with meeting.call() as connection:
        connection.sendall(f"{line}\n".encode())
        return connection.makefile().read()


def test_a_thousand_silent_chatty_and_slow_strangers_keep_nobody_waiting():
    meeting = Meeting(3, timeout_s=20)
    threads = meeting.start(0)
    assert send(meeting, f"{'1' * 32} 1 3") == send(meeting, f"{SHARED.secret} 1") == ""
    began_s = time.monotonic()
    with ExitStack() as stack:
        for number in range(1000):
            stranger = stack.enter_context(meeting.call())
            if number % 3:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50 if number % 3 == 1 else SHARED.secret[:9].encode())
            if number == 800:
                threads += meeting.start(1)
        meeting.hold(2)
        assert meeting.said[2] == "met at 0"
        assert time.monotonic() - began_s < 10
    for thread in threads:
        thread.join()
    assert meeting.said == {0: "met at 0", 1: "met at 0", 2: "met at 0"}


def test_a_silent_stranger_is_turned_away_and_a_node_that_ended_is_missing(monkeypatch):
    monkeypatch.setattr(rendezvous, "_VISIT_S", 0.5)
    meeting = Meeting(3, timeout_s=2)
    (head,) = meeting.start(0)
    with meeting.call() as silent, meeting.call() as node:
        node.sendall(f"{SHARED.secret} 1 3\n".encode())
        assert node.makefile().readline() == "samerun-rendezvous\n"
        assert silent.recv(1) == b""
        assert meeting.said == {}
    head.join()
    assert "b, c did not reach node 0" in meeting.said[0]
    assert "; 1 without the key of the test were refused" in meeting.said[0]


def test_a_node_of_another_run_is_told_one_of_ours_is_not_replaced_and_may_come_again():
    meeting = Meeting(3, timeout_s=20)
    threads = meeting.start(0)
    with meeting.call() as dying:
        dying.sendall(f"{SHARED.secret} 1 3\n".encode())
        assert dying.recv(100)
        for numbers, words in (("1 3", "node 1 has already joined"), ("7 3", "node 7 of 3"), ("2 4", "node 2 of 4")):
            assert words in send(meeting, f"{SHARED.secret} {numbers}")
    meeting.hold(1, 2)
    for thread in threads:
        thread.join()
    assert meeting.said == dict.fromkeys(range(3), "met at 0")


# The token -----------------------------------------------------------------------------------------------------------------


def test_tasks_without_a_common_parent_share_a_token_in_the_run_folder(tmp_path):
    run_dir = str(tmp_path / "runs" / "new")
    tokens = []
    threads = [threading.Thread(target=lambda: tokens.append(find_token({}, run_dir, "22.0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (secret,) = {token.secret for token in tokens}
    assert re.fullmatch("[0-9a-f]{32}", secret)
    (file,) = {token.file for token in tokens}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    meeting = Meeting(2, timeout_s=20)
    meeting.token = tokens[0]
    assert meeting.hold(1, 0) == {0: "met at 0", 1: "met at 0"}
    assert list(file.parent.iterdir()) == []  # nobody needs it any more
    assert find_token({}, run_dir, "22.0").secret != secret


def test_the_launchers_key_goes_before_and_is_another_each_time():
    one, other = new_token(), new_token()
    assert one != other
    found = find_token(one, None, "")
    assert found.secret == one[TOKEN]
    assert one[TOKEN] not in repr(found)
    assert without_token({**one, "PATH": "/bin"}) == {"PATH": "/bin"}


def test_no_key_is_one_sentence():
    with pytest.raises(
        TopologyError, match="the same --run-dir, in a folder that all can read, or the same SAMERUN_MEETING_KEY"
    ):
        find_token({}, None, "")
    with pytest.raises(TopologyError, match="SAMERUN_MEETING_KEY has 6 characters: it must be 32"):
        find_token({TOKEN: "secret"}, None, "")


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
            pytest.skip("only root can give a file to another user")
        os.chown(file, 65534, 65534)
    with pytest.raises(RunFolderError, match=r"\.meeting-22.*choose another --run-dir"):
        find_token({}, str(tmp_path), "22")


def test_a_head_that_has_no_address_is_named():
    said = Meeting(2, timeout_s=0.5, head="no-such-host.invalid").hold(1)
    assert "head_address is 'no-such-host.invalid'" in said[1]
    assert "node 1, cannot reach node 0" in said[1]
    assert "SAMERUN_HOST_SUFFIX" in said[1]


def test_a_port_in_use_that_was_made_from_the_job_is_left_for_the_next(monkeypatch):
    monkeypatch.setattr("launch.start.rendezvous._VISIT_S", 0.2)  # how long the silent one is listened to
    with socket.socket() as other:  # another program, which answers nobody
        other.bind(("", 0))
        other.listen()
        said = Meeting(2, timeout_s=20, port=other.getsockname()[1]).hold(1, 0)
    assert said[0] == said[1]
    assert said[0] != "met at 0"


def test_two_runs_at_one_port_do_not_take_each_others_nodes():
    one = Meeting(2, timeout_s=20)
    other = Meeting(2, timeout_s=20, port=one.topology.port)
    other.token = Token("1" * 32, "the other")
    threads = [threading.Thread(target=meeting.hold, args=(0, 1)) for meeting in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met = [set(meeting.said.values()) for meeting in (one, other)]
    assert all(len(places) == 1 and re.fullmatch(r"met at \d+", *places) for places in met)
    assert met[0] != met[1]
