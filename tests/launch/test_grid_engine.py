"""Grid Engine: a captured job of a real two-host cell, version 8.1.9.

The golden file holds what is found and what starts it; after an intended change:
    PYTHONPATH=. python tests/launch/test_grid_engine.py > tests/golden/grid_engine.txt
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from processes import placed

from app.errors import TopologyError
from launch.schedulers import grid_engine, hosts

CAPTURED = Path(__file__).parents[1] / "environments" / "sge"
GOLDEN = Path(__file__).parents[1] / "golden" / "grid_engine.txt"
HOSTFILE = (CAPTURED / "sge-pe_hostfile.txt").read_text()


def environment(name):
    lines = (CAPTURED / f"sge-2node-4slots-{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def found(hostfile=HOSTFILE, said=None, **options):
    return grid_engine.find(environment("batch") | (said or {}), read=lambda path: hostfile, device_folder=CAPTURED, **options)


def golden_lines():
    jobs = {
        "qsub -pe ddp 4": found(),
        "qsub -pe ddp 4 -t 1-3, task 2": found(said={"SGE_TASK_ID": "2"}),
        "the same with two GPUs on a host": found(said={"CUDA_VISIBLE_DEVICES": "0,1"}),
        "--processes-per-node 1": found(processes_per_node=1),
        "one host": found("node2 4 main.q@node2 UNDEFINED\n"),
    }
    for name, job in jobs.items():
        topology = job.topology
        yield f"# {name}"
        meeting_point = f"{topology.head_address}:{topology.port}"
        yield f"{job.scheduler}: {topology.num_nodes} x {topology.processes_per_node} at {meeting_point}"
        yield from (f"  {topology.described(value)}" for value in sorted(topology.origins))
        yield placed(shlex.join(job.start)) or "(nothing to start)"


def test_what_is_found_is_that_of_the_golden_file():
    assert list(golden_lines()) == GOLDEN.read_text().splitlines()


def test_the_first_host_of_the_file_is_the_head_whatever_its_name():
    topology = found().topology
    assert (topology.hosts, topology.head_address, topology.node_rank) == (("node2", "node1"), "node2", 0)
    assert environment("batch")["HOSTNAME"] == topology.head_address
    assert topology.world_size == int(environment("batch")["NSLOTS"])


def test_a_task_that_was_told_finds_its_place():
    batch = found()
    told = dict(word.split("=") for word in batch.start[4:]) | {"SAMERUN_NODE_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}
    task = environment("task-node1") | told
    assert grid_engine.find(task) is None
    place = hosts.find(task, processes_per_node=2).topology
    assert (place.node_rank, place.head_address, place.port) == (1, "node2", batch.topology.port)
    assert (place.hosts, place.threads_per_process) == (batch.topology.hosts, batch.topology.threads_per_process)


@pytest.mark.parametrize("host", ["node1", "node2"])
def test_a_task_that_was_told_nothing_is_refused(host):
    with pytest.raises(TopologyError, match="each such process would launch the whole run"):
        grid_engine.find(environment(f"task-{host}"))


def test_outside_of_such_jobs_there_is_nothing():
    assert grid_engine.find({}) is None
    single = {name: value for name, value in environment("batch").items() if not name.startswith("PE")}
    assert grid_engine.find(single) is None


def test_slots_of_several_queues_add_up():
    two_queues = "a 1 x.q@a UNDEFINED\nb 2 x.q@b UNDEFINED\na 1 y.q@a <NULL>\n"
    topology = found(two_queues).topology
    assert (topology.hosts, topology.processes_per_node) == (("a", "b"), 2)


@pytest.mark.parametrize(
    ("hostfile", "said", "words"),
    [
        ("a 1 q UNDEFINED\nb 3 q UNDEFINED\n", {}, ["1 on a; 3 on b (PE_HOSTFILE)", "--processes-per-node 1 (2 processes"]),
        ("", {}, ["is empty"]),
        ("a\n", {}, ["PE_HOSTFILE", "cannot be read"]),
        ("a two q\n", {}, ["cannot be read"]),
        (HOSTFILE, {"JOB_ID": "x"}, ["JOB_ID is 'x'"]),
        (HOSTFILE, {"SGE_TASK_ID": "x"}, ["SGE_TASK_ID is 'x'"]),
    ],
)
def test_what_cannot_be_is_refused(hostfile, said, words):
    with pytest.raises(TopologyError) as refusal:
        found(hostfile, said)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_variables_left_over_from_another_job_are_refused():
    with pytest.raises(TopologyError, match=r"No such file.*unset PE"):
        grid_engine.find(environment("batch"))


if __name__ == "__main__":
    print("\n".join(golden_lines()))
