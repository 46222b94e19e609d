"""`samerun doctor`: what it concludes, as tables; what it measures, on real processes, one of them slowed from outside."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import slurm_lab
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from processes import REPOSITORY, TIMEOUT_S, clean_environment

from app.doctor import probe, reach
from app.doctor.diagnosis import AllReduce, Examination, Node, Rank, diagnose, exclude_option, far_below
from app.doctor.reach import BrokenLink
from app.environment.launched import Launched
from app.errors import TopologyError

HOSTS = ("a", "b", "c")


def healthy(hosts: tuple[str, ...] = HOSTS, ranks_per_host: int = 2) -> Examination:
    ranks = []
    for host, local_rank in itertools.product(hosts, range(ranks_per_host)):
        node = Node(
            clock_ms=0.3 * len(ranks), clock_error_ms=0.05, link_to=hosts[(hosts.index(host) + 1) % len(hosts)],
            link_gb_per_s=20.0 + len(ranks), folder="runs", write_mb_per_s=800.0 - len(ranks), free_disk_bytes=10**12,
        )  # fmt: skip
        ranks.append(
            Rank(
                rank=len(ranks),
                host=host,
                address=f"10.0.0.{len(ranks)}",
                device=f"cuda:{local_rank}",
                device_name="H100",
                free_bytes=79 * 2**30,
                total_bytes=80 * 2**30,
                versions={"torch": "2.15.0", "driver": "580.1"},
                numbers_per_s=8e7 - 3e6 * len(ranks),
                node=None if local_rank else node,
            )
        )
    return Examination(ranks=ranks, all_reduces=[AllReduce(size_bytes=2**20, gb_per_s=(5.0, 6.0))])


def changed(examination: Examination, rank: int, *, node: dict | None = None, **values) -> Examination:
    """The same with other figures of one rank, or of its node."""
    ranks = list(examination.ranks)
    ranks[rank] = replace(ranks[rank], **values)
    if node is not None:
        ranks[rank] = replace(ranks[rank], node=replace(ranks[rank].node, **node))
    return replace(examination, ranks=ranks)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b"), HOSTS])
def test_nothing_is_wrong_with_a_healthy_cluster(hosts):
    assert diagnose(healthy(hosts)) == []
    assert exclude_option(healthy(hosts).hosts, []) is None


SICK = {
    "slow device": ({"rank": 3, "numbers_per_s": 8e6}, ["rank 3 on b: cuda:1 draws", "the others"]),
    "memory in use": (
        {"rank": 3, "free_bytes": 20 * 2**30},
        ["rank 3 on b: cuda:1 has 20.0 GiB of free memory, the others 79.0"],
    ),
    "wrong answers": ({"rank": 3, "wrong_answers": ("7 is not 8",)}, ["rank 3 on b: 7 is not 8"]),
    "another driver": (
        {"rank": 3, "versions": {"torch": "2.15.0", "driver": "570.9"}},
        ["b: driver is 570.9; 5 of 6 ranks have 580.1"],
    ),
    "a package less": ({"rank": 3, "versions": {"torch": "2.15.0"}}, ["b: driver is none; 5 of 6"]),
    "another model": ({"rank": 3, "device_name": "A100"}, ["b: device is A100; 5 of 6 ranks have H100"]),
    "clock ahead": ({"rank": 2, "node": {"clock_ms": 5000.0}}, ["b: its clock is 4999 ms ahead"]),
    "clock behind": ({"rank": 2, "node": {"clock_ms": -5000.0}}, ["b: its clock is 5000 ms behind"]),
    "slow folder": ({"rank": 2, "node": {"write_mb_per_s": 9.0}}, ["b: writes runs with 9.0 MB/s, the others with 798.0"]),
    "full folder": ({"rank": 2, "node": {"free_disk_bytes": 2**29}}, ["b: runs has 0.50 GiB free"]),
    "no folder": (
        {"rank": 2, "node": {"folder_error": "Read-only file system", "write_mb_per_s": None}},
        ["b: runs cannot be written: Read-only file system"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), SICK.values(), ids=SICK)
def test_what_is_wrong_is_named_alone_with_its_node(change, words):
    examination = changed(healthy(), **change)
    (problem,) = diagnose(examination)
    assert [word for word in words if word not in str(problem)] == []
    assert exclude_option(examination.hosts, [problem]) == "--exclude=b"


def test_a_clock_that_cannot_be_read_well_is_not_blamed():
    assert diagnose(changed(healthy(), 2, node={"clock_ms": 5000.0, "clock_error_ms": 4500.0})) == []


def test_rank_0_may_be_the_one_with_the_wrong_clock():
    examination = healthy()
    for rank in (2, 4):
        examination = changed(examination, rank, node={"clock_ms": 5000.0 + rank})
    assert [str(problem) for problem in diagnose(examination)] == ["a: its clock is 5002 ms behind: check its time service"]


def test_a_node_is_slow_whose_both_links_are():
    """The links are a -> b, b -> c and c -> a: those of b are slow, and a and c have a fast one left."""
    slow = changed(changed(healthy(), 0, node={"link_gb_per_s": 1.0}), 2, node={"link_gb_per_s": 1.1})
    assert [(problem.host, "best link has 1.10 GB/s" in problem.text) for problem in diagnose(slow)] == [("b", True)]
    assert diagnose(changed(healthy(), 0, node={"link_gb_per_s": 1.0})) == []


def test_a_rank_that_got_a_wrong_sum_is_named():
    (problem,) = diagnose(replace(healthy(), all_reduces=[AllReduce(size_bytes=64, gb_per_s=(1.0,), wrong_ranks=(4,))]))
    assert str(problem) == "rank 4 on c: the all-reduce of 64 bytes gave it a wrong sum"


def test_what_all_nodes_share_is_no_reason_to_leave_them_out():
    examination = healthy()
    for rank in (0, 2, 4):
        examination = changed(examination, rank, node={"free_disk_bytes": 0})
    problems = diagnose(examination)
    assert [problem.host for problem in problems] == list(HOSTS)
    assert exclude_option(examination.hosts, problems) is None


def test_the_memory_of_a_machine_is_spoken_of_once():
    examination = healthy()
    for rank in range(6):
        examination = changed(examination, rank, device="cpu", free_bytes=2**30 if rank in (2, 3) else 2**34)
    (problem,) = diagnose(examination)
    assert str(problem).startswith("rank 2 on b: cpu has 1.0 GiB of free memory")


@given(values=st.lists(st.floats(1.0, 2.9), min_size=1, max_size=30), data=st.data())
def test_only_what_is_far_below_the_others_is(values, data):
    assert far_below(dict(enumerate(values))) == {}
    if len(values) > 1:
        culprit = data.draw(st.integers(0, len(values) - 1))
        others = [value for index, value in enumerate(values) if index != culprit]
        slow = dict(enumerate(values)) | {culprit: statistics.median(others) / 3.1}
        # With a culprit so slow, the others' medians only fall: none of them becomes slow by it.
        assert far_below(slow) == {culprit: statistics.median(others)}


@pytest.mark.parametrize(
    ("rates", "slow"),
    [({}, []), ({0: 0.0}, []), ({0: 1, 1: 3}, []), ({0: 1, 1: 3.1}, [0]), ({0: 0, 1: 5}, [0]), ({0: 0, 1: 0}, []),
     ({0: 1, 1: 9, 2: 1, 3: 9, 4: 9}, [0, 2]), ({rank: 1 if rank < 8 else 9 for rank in range(16)}, list(range(8)))],
)  # fmt: skip
def test_table_of_slow_ones(rates, slow):
    assert list(far_below(rates)) == slow


# What is measured --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 200))
def test_every_link_of_the_ring_is_measured_once_and_no_node_twice_at_a_time(num_nodes):
    links = [link for links in probe.rounds(num_nodes) for link in links]
    assert sorted(links) == ([(node, (node + 1) % num_nodes) for node in range(num_nodes)] if num_nodes > 1 else [])
    for together in probe.rounds(num_nodes):
        ends = list(itertools.chain.from_iterable(together))
        assert len(set(ends)) == len(ends)
    assert len(probe.rounds(num_nodes)) <= 3


def test_writing_leaves_nothing_and_needs_no_folder(tmp_path):
    node = probe.write_files(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    assert (node.folder, node.folder_error) == (str(tmp_path), "")
    assert node.write_mb_per_s is not None
    assert 0 < node.write_mb_per_s < 1e6
    assert node.free_disk_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    assert probe.write_files(tmp_path / "file" / "run").folder_error == "Not a directory"
    assert probe.write_files(Path("/proc/run")).folder_error != ""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "doctor", *arguments],
        cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.multiproc
def test_two_processes(tmp_path):
    process = started("--processes", "2", "--run-dir", str(tmp_path / "runs"), "--json")
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output + errors
    found = json.loads(output)  # nothing else is printed
    assert (found["ok"], found["problems"], found["exclude"]) == (True, [], None)
    assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, socket.gethostname()), (1, socket.gethostname())]
    assert [len(sums["gb_per_s"]) for sums in found["all_reduces"]] == [5, 5, 5]
    assert all(rate > 0 for sums in found["all_reduces"] for rate in sums["gb_per_s"])
    assert [rank["node"] is None for rank in found["ranks"]] == [False, True]
    assert found["ranks"][0]["node"]["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
def test_one_process_is_examined_without_a_word_of_other_libraries(tmp_path):
    process = started("--run-dir", str(tmp_path / "runs"))
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output + errors
    assert [line for line in errors.splitlines() if not line.startswith("samerun doctor: ")] == []


@pytest.mark.multiproc
@pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of a process that it did not start")
def test_a_rank_that_gets_a_tenth_of_the_time_is_named(tmp_path):
    process = started("--processes", "2", "--run-dir", str(tmp_path))
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr))  # type: ignore[arg-type]
    reader.start()

    def has_said(words: str) -> bool:
        return any(words in line for line in said)

    while not has_said("each device alone"):
        assert process.poll() is None, said
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    (slow,) = [child for child in children if child.environ().get("RANK") == "1"]
    while not has_said("clocks and links") and process.poll() is None:
        slow.send_signal(signal.SIGSTOP)
        time.sleep(0.18)
        slow.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    output = process.stdout.read()  # type: ignore[union-attr]
    assert process.wait(TIMEOUT_S) == 1, output
    reader.join()
    process.communicate()  # closes both
    (wrong,) = [line for line in output.splitlines() if line.startswith("WRONG ")]
    assert wrong.startswith(f"WRONG rank 1 on {socket.gethostname()}: cpu draws "), output
    assert "Traceback" not in "".join(said)


def test_a_measurement_that_does_not_end_is_given_up():
    script = (
        "import time; from app.doctor.doctor import patience; from app.environment.launched import Launched\n"
        "with patience('clocks', Launched(rank=0), seconds=0.5): time.sleep(600)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == TopologyError.exit_code, ended.stderr
    assert "TopologyError: clocks: not finished after 0.5 s (--patience)" in ended.stderr


# Which nodes reach which ---------------------------------------------------------------------------------------------------


def both_ways(*pairs: str) -> list[BrokenLink]:
    return [BrokenLink(*ends, "10.0.0.1, port 5: timed out") for pair in pairs for ends in (pair, pair[::-1])]


@pytest.mark.parametrize(
    ("broken", "blamed"),
    [
        ([], {}),
        (both_ways("ab"), {"b": ["a (either way)"]}),
        (both_ways("bc"), {"c": ["b (either way)"]}),
        (both_ways("ab", "bc", "bd"), {"b": ["a (either way), c (either way), d (either way)"]}),
        (both_ways("ab", "cd"), {"d": ["c (either way)"], "b": ["a (either way)"]}),
        (
            [BrokenLink("b", "c", "10.0.0.3, port 7: No route to host")],
            {"c": ["b (to it), for example 10.0.0.3, port 7: No route to"]},
        ),
        ([BrokenLink("c", "b", "10.0.0.2, port 7: timed out")], {"c": ["b (from it)"]}),
    ],
)
def test_the_fewest_nodes_without_which_all_reach_each_other(broken, blamed):
    problems = reach.unreachable(broken, list("abcd"))
    assert [problem.host for problem in problems] == list(blamed)
    for problem, words in zip(problems, blamed.values(), strict=True):
        assert [word for word in words if word not in str(problem)] == []
    option = f"--exclude={','.join(sorted(blamed))}"
    assert exclude_option(list("abcd"), problems) == (option if blamed else None)


def test_a_node_cut_off_from_many_is_one_problem():
    hosts = [f"n{index}" for index in range(100)]
    broken = [BrokenLink("n7", host, "x") for host in hosts if host != "n7"]
    (problem,) = reach.unreachable(broken, hosts)
    assert str(problem).startswith("n7: no connection with n0 (from it), n1 (from it)")
    assert "n8 (from it) and 91 more, for example x" in str(problem)


def test_nodes_tell_each_other_in_the_store_where_they_listen_and_are_reached():
    """Three nodes with two ranks each, all of them threads here, at real ports."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: dict[int, object] = {}

    def one(rank: int) -> None:
        launched = Launched(rank=rank, world_size=6, local_rank=rank % 2, local_world_size=2)
        told[rank] = reach.examine(launched, ("127.0.0.1", server.port), interface=None, timeout_s=20)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told == dict.fromkeys(range(6), ([socket.gethostname()] * 3, []))


def test_a_port_at_which_nobody_answers_is_said_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as gone:
        open_port, closed_port = here.getsockname()[1], gone.getsockname()[1]
        gone.close()
        places = {0: ("a", "127.0.0.1", 1), 2: ("b", "127.0.0.1", open_port), 4: ("c", "127.0.0.1", closed_port)}
        assert reach._broken_links(0, places) == [["a", "c", f"127.0.0.1, port {closed_port}: Connection refused"]]


# Across nodes ------------------------------------------------------------------------------------------------------------

_WHY_NOT = slurm_lab.why_not()


@pytest.mark.multiproc
@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
@pytest.mark.slow
def test_across_two_nodes_of_slurm(tmp_path):
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    with slurm_lab.lab(tmp_path / "lab", outputs, nodes=2, gpus_per_node=0) as lab:
        command = f"samerun doctor --run-dir {tmp_path} --json > {tmp_path}/json; echo $? > {tmp_path}/code; samerun doctor"
        ended = lab.run("salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", command).check()
    assert (tmp_path / "code").read_text().strip() == "0", ended.output
    found = json.loads((tmp_path / "json").read_text())
    assert [rank["host"] for rank in found["ranks"]] == ["node1", "node2"]
    addresses = {rank["address"] for rank in found["ranks"]}
    assert len(addresses) == 2
    assert not any(address.startswith("127.") for address in addresses)
    assert [rank["node"]["link_to"] for rank in found["ranks"]] == ["node2", "node1"]
    for rank in found["ranks"]:
        assert rank["node"]["link_gb_per_s"] > 0
        assert abs(rank["node"]["clock_ms"]) <= rank["node"]["clock_error_ms"] + 1, "the nodes are one machine"
    table = [line for line in ended.output.splitlines() if "\u2502" in line]
    for node in ("node1", "node2"):
        assert any(f" {node} " in line for line in table), ended.output
    assert "nothing is wrong" in ended.output


@pytest.mark.multiproc
@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
@pytest.mark.slow
def test_nodes_that_do_not_reach_each_other_are_named(tmp_path):
    """As behind a firewall that drops what it does not like: what node2 sends to another goes to nobody's address."""
    (tmp_path / "outputs").mkdir()

    def examined(lab, cut_off):
        folder = tmp_path / f"cut-off-from-{cut_off}"
        folder.mkdir()
        address = f"10.77.0.{cut_off[-1]}"
        at_node2 = ("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
        lab.run(*at_node2, node="node2").check()
        command = f"samerun doctor --patience 15 --run-dir {tmp_path}/runs"
        ended = lab.run("salloc", "--nodes=3", "--ntasks-per-node=1", "sh", "-c", command, env={"TMPDIR": str(folder)})
        lab.run("ip", "neigh", "del", address, "dev", "eth0", node="node2").check()
        assert ended.returncode == 1, ended.output
        assert list(folder.iterdir()) == []
        assert "app/doctor/doctor.py" not in ended.output, "a traceback of ours"
        return ended.output

    with slurm_lab.lab(tmp_path / "lab", tmp_path / "outputs", nodes=3, gpus_per_node=0) as lab:
        output = examined(lab, "node3")
        assert "WRONG node3: no connection with node2 (either way), for example 10.77.0.3, port " in output
        assert "sbatch --exclude=node3" in output
        assert "joining the process group" not in output
        assert "WRONG node2 did not reach node 0 in 15 s (head_address is 'node1'" in examined(lab, "node1")
