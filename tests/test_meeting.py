"""The nodes of a run meet: each is a thread here, at a real port."""

from __future__ import annotations

import re
import socket
import threading
import time
from dataclasses import replace

import pytest
from processes import free_port

from app.errors import TopologyError
from app.topology import Topology
from launch.meeting import meet


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
        self.said: dict[int, str] = {}

    def _attend(self, node_rank: int) -> None:
        try:
            port = meet(replace(self.topology, node_rank=node_rank), timeout_s=self.timeout_s, only_port=self.only_port)
            self.said[node_rank] = f"met at {port - self.topology.port}"
        except TopologyError as error:
            self.said[node_rank] = str(error)

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
        assert sentence.endswith("do without (under Slurm: --exclude=b,d)")


def test_a_head_that_cannot_be_reached_is_said_by_those_who_tried():
    said = Meeting(2, timeout_s=0.5).hold(1)
    assert "node 1, cannot reach node 0" in said[1]
    assert "Connection refused" in said[1]


def test_a_stranger_at_the_door_is_not_counted():
    meeting = Meeting(2, timeout_s=20)

    def call() -> None:
        for _ in range(100):
            try:
                with socket.create_connection((meeting.topology.head_address, meeting.topology.port), timeout=5) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n")
                    return
            except ConnectionRefusedError:
                time.sleep(0.02)

    stranger = threading.Thread(target=call)
    head = threading.Thread(target=meeting.hold, args=(0,))
    head.start()
    stranger.start()
    stranger.join()
    assert meeting.said == {}
    meeting.hold(1)
    head.join()
    assert meeting.said == {0: "met at 0", 1: "met at 0"}


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
    monkeypatch.setattr("launch.meeting._CONNECT_S", 0.2)  # how long the silent one is listened to
    said = Meeting(2, timeout_s=20, port=taken).hold(1, 0)
    assert said[0] == said[1]
    assert said[0] != "met at 0"


def test_two_runs_at_one_port_do_not_take_each_others_nodes():
    one = Meeting(2, timeout_s=20)
    other = Meeting(2, timeout_s=20, port=one.topology.port)
    other.topology = replace(other.topology, hosts=("x", "y"))
    threads = [threading.Thread(target=meeting.hold, args=(0, 1)) for meeting in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met = [set(meeting.said.values()) for meeting in (one, other)]
    assert all(len(places) == 1 and re.fullmatch(r"met at \d+", *places) for places in met)
    assert met[0] != met[1]
