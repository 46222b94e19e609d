"""The nodes of a run meet: each is a thread here, at a real port, and so is who has no business there."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from processes import free_port

from app.errors import RunFolderError, TopologyError
from app.place.topology import Topology
from launch.start import meeting_key
from launch.start.meeting import meet
from launch.start.meeting_key import Key

KEY = Key(b"0" * 32, "the test")


class Meeting:
    """Nodes of one run, each a thread of this process."""

    def __init__(self, num_nodes: int, *, timeout_s: float, head: str = "", port: int = 0, only_port: bool = False) -> None:
        self.topology = Topology(
            num_nodes=num_nodes,
            head_address=head or socket.gethostname(),
            port=port or free_port(),
            hosts=tuple("abcdef"[:num_nodes]),
        )
        self.timeout_s = timeout_s
        self.only_port = only_port
        self.key = KEY
        self.said: dict[int, str] = {}

    def _attend(self, node_rank: int) -> None:
        topology = replace(self.topology, node_rank=node_rank)
        try:
            port = meet(topology, self.key, timeout_s=self.timeout_s, only_port=self.only_port)
            self.said[node_rank] = f"met at {port - self.topology.port}"
        except TopologyError as error:
            self.said[node_rank] = str(error)

    def begin(self, *node_ranks: int) -> list[threading.Thread]:
        """Start the nodes; return when node 0, if it is one of them, listens."""
        threads = [threading.Thread(target=self._attend, args=(node_rank,)) for node_rank in node_ranks]
        for thread in threads:
            thread.start()
        if 0 in node_ranks:
            self.call().close()
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
        threads = [threading.Thread(target=self._attend, args=(node_rank,)) for node_rank in node_ranks]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
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


def test_a_head_that_cannot_be_reached_is_said_by_those_who_tried():
    said = Meeting(2, timeout_s=0.5).hold(1)
    assert "node 1, cannot reach node 0" in said[1]
    assert "Connection refused" in said[1]


# Strangers -----------------------------------------------------------------------------------------------------------------


class Visitor:
    """Somebody at node 0's door who knows how nodes speak and, with a right key, is as good as one."""

    def __init__(self, meeting: Meeting, key: bytes) -> None:
        self.connection = meeting.call()
        self.heard = self.connection.makefile("r")
        self.connection.sendall(f"{meeting_key.GREETING} {'5' * 32}\n".encode())
        greeting, number, proof = self.heard.readline().split()
        assert greeting == meeting_key.GREETING
        self.sign = meeting_key.signer(key, "5" * 32, number)
        self.believes = meeting_key.is_proof(proof, self.sign("head"))

    def say(self, node_rank: int, num_nodes: int) -> None:
        words = str(node_rank), str(num_nodes)
        self.connection.sendall(f"{' '.join(words)} {self.sign('node', *words)}\n".encode())

    def leave(self) -> None:
        self.heard.close()
        self.connection.close()


@pytest.mark.parametrize("node_rank", [1, 7])
def test_a_visitor_without_the_key_takes_no_place_and_ends_nothing(node_rank):
    meeting = Meeting(2, timeout_s=20)
    (head,) = meeting.begin(0)
    visitor = Visitor(meeting, b"1" * 32)
    assert not visitor.believes  # nor would a node with another key stay
    visitor.say(node_rank, 2)
    assert visitor.heard.read() == ""
    visitor.leave()
    assert meeting.said == {}
    meeting.hold(1)
    head.join()
    assert meeting.said == {0: "met at 0", 1: "met at 0"}


def test_any_number_of_silent_chatty_and_slow_visitors_keep_nobody_waiting():
    meeting = Meeting(3, timeout_s=20)
    threads = meeting.begin(0)
    with ExitStack() as stack:
        began_s = time.monotonic()
        for number in range(600):
            visitor = stack.enter_context(meeting.call())
            if number % 3 == 1:
                visitor.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif number % 3 == 2:
                visitor.sendall(meeting_key.GREETING.encode() + b" 12")
            if number == 500:
                threads += meeting.begin(1)
        meeting.hold(2)
        assert meeting.said[2] == "met at 0"
        assert time.monotonic() - began_s < 10
    for thread in threads:
        thread.join()
    assert meeting.said == {0: "met at 0", 1: "met at 0", 2: "met at 0"}


def test_who_was_turned_away_and_who_left_is_in_the_sentence():
    meeting = Meeting(3, timeout_s=1.5)
    (head,) = meeting.begin(0)
    meeting.call().close()
    node = Visitor(meeting, KEY.secret)
    assert node.believes
    node.say(1, 3)
    time.sleep(0.2)
    node.leave()
    head.join()
    assert "b, c did not reach node 0" in meeting.said[0]
    assert "b did, but ended before the others arrived; 2 without the key of the test" in meeting.said[0]


def test_a_node_that_died_at_the_door_may_come_again():
    meeting = Meeting(3, timeout_s=20)
    (head,) = meeting.begin(0)
    dying = Visitor(meeting, KEY.secret)
    dying.say(1, 3)
    dying.connection.shutdown(socket.SHUT_RDWR)
    dying.leave()
    meeting.hold(1, 2)
    head.join()
    assert meeting.said == dict.fromkeys(range(3), "met at 0")


def test_a_node_of_another_run_is_told_and_one_of_ours_is_not_replaced():
    meeting = Meeting(3, timeout_s=20)
    threads = meeting.begin(0, 1)
    time.sleep(0.3)
    for told, words in (((1, 3), "node 1 has already joined"), ((7, 3), "node 7 of 3"), ((2, 4), "node 2 of 4")):
        visitor = Visitor(meeting, KEY.secret)
        visitor.say(*told)
        proof, _, verdict = visitor.heard.readline().rstrip("\n").partition(" ")
        assert words in verdict
        assert meeting_key.is_proof(proof, visitor.sign("verdict", verdict))
        visitor.leave()
    meeting.hold(2)
    for thread in threads:
        thread.join()
    assert meeting.said == dict.fromkeys(range(3), "met at 0")


def test_who_listens_in_node_0s_place_is_not_believed():
    meeting, heard = Meeting(2, timeout_s=0.5, only_port=True), []

    def answer(impostor: socket.socket) -> None:
        while not meeting.said:
            with suppress(TimeoutError), impostor.accept()[0] as connection:
                heard.append(connection.recv(200))
                connection.sendall(f"{meeting_key.GREETING} {'1' * 32} {'2' * 64}\n".encode())
                heard.append(connection.recv(200))  # nothing: a node says no more to who has no proof

    with socket.create_server(("", meeting.topology.port)) as impostor:
        impostor.settimeout(0.1)
        thread = threading.Thread(target=answer, args=(impostor,))
        thread.start()
        said = meeting.hold(1)
        thread.join()
    assert "not a node of this run, or does not know the key of the test" in said[1]
    assert len(heard) >= 2
    assert {line.partition(b" ")[0] for line in heard[::2]} == {b"samerun-meeting"}
    assert set(heard[1::2]) == {b""}
    assert KEY.secret not in b"".join(heard)


# The key -------------------------------------------------------------------------------------------------------------------


def test_tasks_without_a_common_parent_share_a_key_in_the_run_folder(tmp_path):
    run_dir = str(tmp_path / "runs" / "new")
    keys = []
    threads = [threading.Thread(target=lambda: keys.append(meeting_key.find({}, run_dir, "22.0"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (secret,) = {key.secret for key in keys}
    assert re.fullmatch(rb"[0-9a-f]{32}", secret)
    (file,) = {key.file for key in keys}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    meeting = Meeting(2, timeout_s=20)
    meeting.key = keys[0]
    assert meeting.hold(1, 0) == {0: "met at 0", 1: "met at 0"}
    assert list(file.parent.iterdir()) == []  # nobody needs it any more
    assert meeting_key.find({}, run_dir, "22.0").secret != secret


def test_the_launchers_key_goes_before_and_is_another_each_time():
    one, other = meeting_key.new(), meeting_key.new()
    assert one != other
    found = meeting_key.find(one, None, "")
    assert found.secret.decode() == one[meeting_key.KEY]
    assert one[meeting_key.KEY] not in repr(found)
    assert meeting_key.without({**one, "PATH": "/bin"}) == {"PATH": "/bin"}


def test_no_key_is_one_sentence():
    with pytest.raises(
        TopologyError, match="the same --run-dir, in a folder that all can read, or the same SAMERUN_MEETING_KEY"
    ):
        meeting_key.find({}, None, "")
    with pytest.raises(TopologyError, match="SAMERUN_MEETING_KEY has 6 characters: it must be 32"):
        meeting_key.find({meeting_key.KEY: "secret"}, None, "")


@pytest.mark.parametrize("kind", ["open", "pipe", "link", "folder", "empty"])
def test_a_key_that_somebody_else_may_know_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(meeting_key, "_WRITTEN_WITHIN_S", 0.2)
    file, known = tmp_path / ".meeting-22", "0" * 32
    if kind == "open":
        file.write_text(known)
        file.chmod(0o644)
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "link":
        (tmp_path / "known").write_text(known)
        (tmp_path / "known").chmod(0o600)
        file.symlink_to("known")
    elif kind == "folder":
        file.mkdir()
    else:
        file.touch(0o600)
    with pytest.raises(RunFolderError, match=f"{file}.*(another --run-dir|--run-dir of your own|start again)"):
        meeting_key.find({}, str(tmp_path), "22")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_key_is_refused(tmp_path):
    file = tmp_path / ".meeting-22"
    file.write_text("0" * 32)
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    with pytest.raises(RunFolderError, match="of user 65534"):
        meeting_key.find({}, str(tmp_path), "22")


def test_a_name_that_nobody_has_is_said():
    said = Meeting(2, timeout_s=0.5, head="no-such-host.invalid").hold(1)
    assert "head_address is 'no-such-host.invalid'" in said[1]
    assert "SAMERUN_HOST_SUFFIX" in said[1]


@pytest.fixture
def taken():
    """A port at which another program listens, and answers nobody."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_that_the_user_chose_is_said(taken):
    said = Meeting(2, timeout_s=0.5, port=taken, only_port=True).hold(0)
    assert re.fullmatch(r"port is \d+ \(default\) is in use on a, node 0: choose a free one with --port N", said[0])


def test_a_port_in_use_that_was_made_from_the_job_is_left_for_the_next(taken, monkeypatch):
    monkeypatch.setattr("launch.start.meeting._CONNECT_S", 0.2)  # how long the silent one is listened to
    said = Meeting(2, timeout_s=20, port=taken).hold(1, 0)
    assert said[0] == said[1]
    assert said[0] != "met at 0"


def test_two_runs_at_one_port_do_not_take_each_others_nodes():
    one = Meeting(2, timeout_s=20)
    other = Meeting(2, timeout_s=20, port=one.topology.port)
    other.key = Key(b"1" * 32, "the other")
    threads = [threading.Thread(target=meeting.hold, args=(0, 1)) for meeting in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met = [set(meeting.said.values()) for meeting in (one, other)]
    assert all(len(places) == 1 and re.fullmatch(r"met at \d+", *places) for places in met)
    assert met[0] != met[1]
