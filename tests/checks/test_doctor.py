"""`samerun doctor`: its conclusions, as tables; its measurements, on real processes and on nodes of Slurm."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import slurm_lab
import torch.distributed as dist
from processes import Started

from app.checks import doctor
from app.checks.arithmetic import Fault
from app.checks.doctor import AllReduce, BrokenLinks, Examination, ProcessInfo
from app.environment.launched import Launched


def examined(*, wrong: Sequence[int] = (0,) * 6, **values) -> Examination:
    """Three hosts of two ranks, of which rank 3 has other facts."""
    versions = {"torch": "2.15.0", "driver": "580.1"}
    processes = [
        ProcessInfo(host, "10.0.0.1", f"cuda:{rank}", "H100", (79 * 2**30, 80 * 2**30), versions)
        for host in "abc"
        for rank in range(2)
    ]
    processes[3] = processes[3]._replace(**values)
    return Examination(processes, all_reduces=[AllReduce(64, 1.0, wrong)])


@pytest.mark.parametrize(
    ("examination", "sentence"),
    [
        (examined(versions={"torch": "2.15.0", "driver": "570.9"}), "b: driver is 570.9; 5 of 6 ranks have 580.1"),
        (examined(device_name="A100"), "b: device is A100; 5 of 6 ranks have H100"),
        (examined(wrong=[0, 0, 0, 5, 0, 0]), "rank 3 on b: the all-reduce of 64 bytes gave 5 wrong sums"),
    ],
)
def test_a_problem_is_reported_once_with_its_node(examination, sentence):
    (problem,) = doctor.diagnose(examination)
    assert str(problem) == sentence
    assert doctor.exclude_option([process.host for process in examination.processes], [problem]) == "--exclude=b"


def test_no_node_is_excluded_if_all_have_problems():
    problems = [Fault(host, "") for host in "ab"]
    assert doctor.exclude_option(["a", "b", "c"], problems) == "--exclude=a,b"
    assert doctor.exclude_option(["a", "b"], problems) is None


def test_bandwidths_are_those_of_nccl_tests():
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: busbw = algbw * 2(n-1)/n."""
    all_reduce = AllReduce(10**9, 0.5, [0] * 4)
    assert (all_reduce.algbw_gb_per_s, all_reduce.busbw_gb_per_s) == (2.0, 3.0)


# Real processes ----------------------------------------------------------------------------------------------------------


def started(*arguments: str, folder: Path) -> Started:
    command = [sys.executable, "-m", "launch.cli", "doctor", "--processes", "2", *arguments]
    return Started(command, cwd=folder, env={"PET_SHUTDOWN_TIMEOUT": "1"})


@pytest.mark.multiproc
def test_two_processes(tmp_path):
    output = started(folder=tmp_path).wait().check().output
    assert "processes: 2, nodes: 1" in output
    ranks = re.findall(rf"\u2502 +(\d) \u2502 {socket.gethostname()} +\u2502 [\d.]+ +\u2502 cpu +\u2502", output)
    assert ranks == ["0", "1"]
    figures = re.findall(r"\u2502 +([\d.]+) \u2502 +[\d.]+ \u2502 +[\d.]+ \u2502 +[\d.]+ \u2502 +(\d+) \u2502", output)
    assert figures == [("0.0625", "0"), ("1", "0"), ("16", "0")]
    assert re.search(r"^versions of rank 0: python 3\.\S+, samerun .* torch 2\.", output, re.MULTILINE)
    assert output.endswith("\nnothing is wrong\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_frozen_rank_is_ended_with_the_others(tmp_path):
    running = started("--patience", "8", folder=tmp_path)
    frozen: list[psutil.Process] = []
    while not frozen:
        assert not running.is_over()
        frozen = [process for process in running.processes() if process.environ().get("RANK") == "1"]
        time.sleep(0.1)
    frozen[0].send_signal(signal.SIGSTOP)
    finished = running.wait()
    assert finished.returncode == 1
    assert "TopologyError: joining the process group: not finished after 8 s (--patience)" in finished.output
    assert not frozen[0].is_running()


# Which nodes can connect to each other -----------------------------------------------------------------------------------


def both_ways(*pairs: str) -> BrokenLinks:
    return {(first, second): "10.0.0.1, port 5: timed out" for pair in pairs for first, second in (pair, pair[::-1])}


@pytest.mark.parametrize(
    ("broken", "isolated"),
    [
        ({}, {}),
        (both_ways("ab"), {"b": "a, for example 10.0.0.1, port 5: timed out. Check firewall"}),
        (both_ways("ab", "bc", "bd"), {"b": "a, c, d"}),
        (both_ways("ab", "cd"), {"d": "c", "b": "a"}),
        ({("b", "c"): "no route"}, {"c": "b, for example no route. "}),
    ],
)
def test_the_fewest_nodes_without_which_all_connect_to_each_other(broken, isolated):
    found = doctor.isolated_nodes(broken, list("abcd"))
    assert list(found) == list(isolated)
    for host, text in isolated.items():
        assert found[host].startswith(f"no connection with {text}")


def test_nodes_exchange_their_addresses_in_the_store_and_connect():
    """Three nodes with two ranks each, all of them threads here, at real ports."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[int, object] = {}

    def one(rank: int) -> None:
        launched = Launched(rank=rank, world_size=6, local_rank=rank % 2, local_world_size=2)
        found[rank] = doctor.find_broken_links(launched, ("127.0.0.1", server.port), interface=None, timeout_s=20)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(range(6), ([socket.gethostname()] * 3, {}))


def test_a_closed_port_is_reported_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as opened, socket.create_server(("127.0.0.1", 0)) as closed:
        open_port, closed_port = opened.getsockname()[1], closed.getsockname()[1]
        closed.close()
        broken = doctor.connect_all("a", [("b", "127.0.0.1", open_port), ("c", "127.0.0.1", closed_port)])
        assert broken == {("a", "c"): f"127.0.0.1, port {closed_port}: Connection refused"}


# Across nodes ------------------------------------------------------------------------------------------------------------

_WHY_NOT = slurm_lab.why_not()


@pytest.mark.multiproc
@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
@pytest.mark.slow
def test_nodes_of_slurm(tmp_path):
    """Healthy, then as behind a firewall that drops packets: what node2 sends to another node goes to a wrong address."""
    (tmp_path / "outputs").mkdir()

    def examine(lab, cut_off=None, code=0):
        folder = tmp_path / f"cut-off-from-{cut_off}"
        folder.mkdir()
        command = ("salloc", "--nodes=3", "--ntasks-per-node=1", "samerun", "doctor", "--patience", "15")
        if cut_off:
            address = f"10.77.0.{cut_off[-1]}"
            route = (address, "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
            lab.run("ip", "neigh", "replace", *route, node="node2").check()
        ended = lab.run(*command, env={"TMPDIR": str(folder)})
        if cut_off:
            lab.run("ip", "neigh", "del", address, "dev", "eth0", node="node2").check()
        assert ended.returncode == code, ended.output
        assert list(folder.iterdir()) == []
        assert "app/checks/doctor.py" not in ended.output, "a traceback of ours"
        return ended.output

    with slurm_lab.lab(tmp_path / "lab", tmp_path / "outputs", nodes=3, gpus_per_node=0) as lab:
        output = examine(lab)
        assert "processes: 3, nodes: 3" in output
        for number in (1, 2, 3):
            assert re.search(rf"\u2502 +node{number} +\u2502 +10\.77\.0\.{number} +\u2502 cpu ", output), output
        assert "nothing is wrong" in output
        output = examine(lab, "node3", code=1)
        assert "WRONG node3: no connection with node2, for example 10.77.0.3, port " in output
        assert "sbatch --exclude=node3" in output
        assert "joining the process group" not in output
        assert "TopologyError: node2 did not reach node 0 in 15 s (head_address is 'node1'" in examine(lab, "node1", code=5)
