"""PBS: captured jobs of a real two-node OpenPBS 23.06, and the commands that their batch scripts run on the hosts.

The golden file holds, for every captured shape of job, what is found and the command of each host; after an intended change:
    PYTHONPATH=. python tests/launch/test_pbs.py > tests/golden/pbs.txt
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from processes import captured, placed

from app.environment.topology import port_of_job
from app.errors import TopologyError
from launch.schedulers import hosts, pbs
from launch.schedulers.hosts import NotDoneError
from launch.start import spread

CAPTURED = Path(__file__).parents[1] / "environments" / "pbs"
GOLDEN = Path(__file__).parents[1] / "golden" / "pbs.txt"
NO_DEVICES = Path(__file__).parents[1] / "environments"  # a folder without device files
SHAPES = sorted(path.name.removesuffix("-batch.txt") for path in CAPTURED.glob("*-batch.txt") if "rerun" not in path.name)


def environment(name):
    return captured(f"pbs/{name}")


def found(name, nodefile=None, **options):
    text = (CAPTURED / f"nodefile-{nodefile or name.removesuffix('-batch')}.txt").read_text()
    return pbs.find(environment(name), read=lambda path: text, device_folder=NO_DEVICES, **options)


def golden_lines():
    yield "# each captured job: its hosts and meeting point, what starts it, and the command that this runs on each host"
    argv = ["/home/user/venv/bin/samerun", "launch", "data.path=with space"]
    for shape in SHAPES:
        yield f"\n{shape}: {(CAPTURED / f'{shape}-batch.txt').read_text().splitlines()[0]}"
        try:
            job = found(f"{shape}-batch")
        except TopologyError as error:
            yield f"refused: {error}"
            continue
        topology = job.topology
        meeting_point = f"{topology.head_address}:{topology.port}"
        yield f"{job.scheduler}: {topology.num_nodes} x {topology.processes_per_node} at {meeting_point}"
        yield placed(shlex.join(job.start)) or "(nothing to start)"
    yield "\n# on a host, by each starter"
    for starter in hosts.STARTERS:
        file, marks = Path("/home/user/.samerun-start-0/0"), {"SAMERUN_NODE_RANK": "0"}
        yield shlex.join(spread.host_command(starter, "node1", argv, folder="/home/user", marks=marks, file=file))
    yield "\n# what ends it on a host"
    yield spread.stop_script({"SAMERUN_PORT": "20003", "SAMERUN_NODE_RANK": "1"}, kill_after_s=5)


def test_what_is_found_and_run_is_that_of_the_golden_file():
    assert len(SHAPES) >= 13
    assert "\n".join(golden_lines()).splitlines() == GOLDEN.read_text().splitlines()


# Hosts and processes -------------------------------------------------------------------------------------------------------


def test_a_task_that_was_told_nothing_is_refused():
    with pytest.raises(TopologyError, match="each such process would launch the whole run"):
        found("select-2x2-pbsdsh-task20000001", "select-2x2")


def test_a_task_that_was_told_finds_its_place():
    batch = found("select-2x2-batch")
    task = environment("select-2x2-pbsdsh-task20000001")
    told = dict(word.split("=") for word in batch.start[4:]) | {"SAMERUN_NODE_RANK": "1"}
    assert pbs.find(task | told) is None
    place = hosts.find(task | told, processes_per_node=2)
    assert place.topology == replace(batch.topology, node_rank=1)
    assert place.start == ()


JOB = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "file", "PBS_NODENUM": "0"}


@pytest.fixture
def shared_node(tmp_path):
    """A /dev with eight GPUs, some of them of other jobs."""
    for index in range(8):
        (tmp_path / f"nvidia{index}").touch()
    return tmp_path


def described(gpus):
    """Output of qstat for a job with so many GPUs on each host."""
    vnodes = "+".join(f"({host}:ncpus=4" + (f":ngpus={count})" if count else ")") for host, count in gpus.items())
    return lambda job_id: json.dumps({"Jobs": {job_id: {"exec_vnode": vnodes}}})


def no_qstat(_):
    raise NotDoneError("no such program")


def processes(counts, devices=None, **options):
    given_devices = {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    lines = "".join(f"{host}\n" * count for host, count in counts.items())
    job = pbs.find(JOB | given_devices, read=lambda path: lines, **{"device_folder": NO_DEVICES} | options)
    found = job.topology
    return found.processes_per_node, found.origins["processes_per_node"]


@pytest.mark.parametrize(
    ("lines", "devices", "options", "expected"),
    [
        (4, 0, {}, (4, "PBS_NODEFILE")),  # the cgroup hook empties the list in jobs without GPUs
        (2, 4, {}, (2, "PBS_NODEFILE")),  # mpiprocs=2 was said
        (64, 4, {}, (4, "CUDA_VISIBLE_DEVICES=0,1,2,3 on this host")),  # a line for every core
        (1, 4, {"processes_per_node": 3}, (3, "--processes-per-node")),
    ],
)
def test_processes_on_a_host(lines, devices, options, expected):
    assert processes({"a": lines, "b": lines}, devices, **options) == expected


@pytest.mark.parametrize(
    ("describe_job", "expected"),
    [
        (described({"a": 2, "b": 2}), (2, "exec_vnode of qstat -f")),
        (described({"a[0]": 1, "a[1]": 2, "b": 3}), (3, "exec_vnode of qstat -f")),  # parts of a node
        (described({"a": 0, "b": 0}), (8, "nvidia* on this host")),  # the site does not count GPUs, and gives whole nodes
        (no_qstat, (8, "nvidia* on this host")),
    ],
)
def test_of_a_shared_node_the_gpus_of_the_job_are_used(shared_node, describe_job, expected):
    count, origin = processes({"a": 1, "b": 1}, device_folder=shared_node, describe_job=describe_job)
    assert (count, origin.removeprefix(f"{shared_node}/")) == expected


def test_hosts_that_are_not_alike_are_refused_with_the_legal_choices(shared_node):
    counts = {"a": 6, "b": 4, "c": 4}
    with pytest.raises(TopologyError, match=r"4 on b, c; 6 on a \(PBS_NODEFILE\).*node 1 to 4, or request equal hosts"):
        processes(counts)
    assert processes(counts, processes_per_node=1)[0] == 1
    with pytest.raises(TopologyError, match=r"0 on b; 2 on a \(exec_vnode.*--processes-per-node 1, or"):
        processes({"a": 1, "b": 1}, device_folder=shared_node, describe_job=described({"a": 2, "b": 0}))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (JOB | {"PBS_NODEFILE": os.devnull}, "PBS_NODEFILE /dev/null is empty"),
        (JOB | {"PBS_JOBID": "head", "PBS_NODEFILE": str(CAPTURED / "nodefile-select-2x2.txt")}, "PBS_JOBID is 'head'"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(job, words):
    with pytest.raises(TopologyError, match=words):
        pbs.find(job)


@pytest.mark.parametrize(
    ("said", "select", "expected"),
    [
        ({"NCPUS": "8", "OMP_NUM_THREADS": "8"}, "2:ncpus=8", (4, "NCPUS=8, divided by the processes")),
        ({"NCPUS": "2", "OMP_NUM_THREADS": "2"}, "2:ncpus=4:mpiprocs=2:ompthreads=2", (2, "ompthreads=2 of qstat -f")),
        ({"NCPUS": "8", "OMP_NUM_THREADS": "3"}, "2:ncpus=8", (3, "OMP_NUM_THREADS=3")),
        ({}, "2:ncpus=8", (None, None)),
    ],
)
def test_threads_of_a_process(said, select, expected):
    text = json.dumps({"Jobs": {"7.head": {"Resource_List": {"select": select}}}}, indent=4)
    options = {"device_folder": NO_DEVICES, "describe_job": lambda job_id: text}
    topology = pbs.find(JOB | said, read=lambda path: "a\na\nb\nb\n", **options).topology
    assert (topology.threads_per_process, topology.origins.get("threads_per_process")) == expected


# Ports ---------------------------------------------------------------------------------------------------------------------


def test_the_port_of_a_job_and_of_a_task_of_an_array():
    assert (pbs.port("14.head"), pbs.port("14[1].head")) == (port_of_job(14), port_of_job(14, 1))


# What qstat tells ----------------------------------------------------------------------------------------------------------


def test_the_captured_json():
    text = (CAPTURED / "qstat-json.txt").read_text().split("\n", 1)[1]
    times, gpus = pbs.parse_job(text, job_id="24.head")
    moment_s = datetime(2026, 11, 21, 10, 7, 16).timestamp()
    assert (times.submitted_s, times.started_s, times.ends_s) == (moment_s, moment_s, None)
    assert gpus == {"node1": 0, "node2": 0}
    # A line break inside a value is not JSON, but PBS writes it as it is.
    assert pbs.parse_job(text.replace("a b", "a\nb"), job_id="24.head") == (times, gpus)


@pytest.mark.parametrize("text", ['{"Jobs": {"2": {}}}', '{"Jobs": {"1": {"stime": "now"}}}'])
def test_what_is_no_description_of_the_job_is_refused(text):
    with pytest.raises(TopologyError, match="qstat -f -F json 1` did not describe the job"):
        pbs.parse_job(text, job_id="1")


# The batch script ----------------------------------------------------------------------------------------------------------


def test_the_batch_script_hands_the_arguments_on_and_starts_in_the_project(tmp_path):
    """As PBS starts it: in the home folder, with a PATH that is not the user's."""
    fake, project = tmp_path / "bin" / "samerun", tmp_path / "my project"
    fake.parent.mkdir()
    project.mkdir()
    fake.write_text('#!/bin/sh\nprintf "<%s>" "$PWD" "$@"; exit 42\n')
    fake.chmod(0o755)
    said = {"SAMERUN_ARGS": "--preset multi_node --run-dir 'a b' 'data.path=$HOME/*'", "PATH": "/bin:/usr/bin"}
    batch = environment("select-2x2-batch") | said | {"PBS_O_WORKDIR": str(project), "PBS_O_PATH": str(fake.parent)}
    script = Path(pbs.__file__).parents[1] / "multinode.pbs"
    result = subprocess.run(["/bin/bash", str(script)], env=batch, cwd="/", capture_output=True, text=True, check=False)
    assert result.stdout == f"<{project}><launch><--preset><multi_node><--run-dir><a b><data.path=$HOME/*>"
    assert result.returncode == 42


if __name__ == "__main__":
    print("\n".join(golden_lines()))
