"""LSF, SkyPilot and Kubeflow: their variables as documented, and trainings on two "nodes" that have them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from processes import Started, clean_environment, losses, train

from app.environment.launched import without_leftovers
from app.errors import TopologyError
from launch.schedulers import detect, platforms

LSF = {"LSB_JOBID": "7001", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "hosta 4 hostb 4"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
            "PET_MASTER_PORT": "29500"}  # fmt: skip

HEAD, TWO_GPUS, PODS = socket.gethostname(), {"CUDA_VISIBLE_DEVICES": "0,1"}, ("pod0", "pod1")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (LSF, (2, 4, 0, "hosta", 19001, ("hosta", "hostb"))),
        ({**LSF, "LSB_MCPU_HOSTS": "hosta 1 hostb 1", **TWO_GPUS}, (2, 2, 0, "hosta", 19001, ("hosta", "hostb"))),
        ({**LSF, "LSB_MCPU_HOSTS": "hosta 2 hosta 1"}, (1, 3, 0, "127.0.0.1", 0, ("hosta",))),
        (SKYPILOT, (2, 8, 1, "10.0.0.1", 29500, ("10.0.0.1", "10.0.0.2"))),
        ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}, (2, 1, 1, "10.0.0.1", 29500, ("10.0.0.1", "10.0.0.2"))),
        (TRAINJOB, (2, 4, 1, "job-node-0-0.job", 29500, PODS)),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "auto", **TWO_GPUS}, (2, 2, 1, "job-node-0-0.job", 29500, PODS)),
        ({**TRAINJOB, "RANK": "1", "WORLD_SIZE": "8"}, (2, 4, 1, "job-node-0-0.job", 29500, PODS)),
    ],
)  # fmt: skip
def test_the_topology(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    environment = without_leftovers({"CUDA_VISIBLE_DEVICES": "", **variables}, say=pytest.fail)
    found = detect.find(environment)
    assert found
    it = found.topology
    assert (it.num_nodes, it.processes_per_node, it.node_rank, it.head_address, it.port, it.hosts) == expected
    assert found.is_task == (it.num_nodes > 1 and variables.get("LSB_JOBID") is None)
    assert ("blaunch" in found.start) == (it.num_nodes > 1 and "LSB_JOBID" in variables)
    job = detect.job({**environment, "LSB_JOBINDEX": "3"})
    assert (job and job.name) == ("7001_3" if "LSB_JOBID" in variables else None)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({**LSF, "LSB_MCPU_HOSTS": "hosta hostb"}, "LSB_MCPU_HOSTS=hosta hostb: LSB_MCPU_HOSTS must be hosts with their slots"),
        (
            {**LSF, "LSB_MCPU_HOSTS": f"hosta 4 {HEAD} 4"},
            f"this machine is {HEAD}, which is not the first host of LSF job 7001",
        ),
        ({**LSF, "LSB_MCPU_HOSTS": "hosta 4 hostb 2"}, "the hosts differ: 2 on hostb; 4 on hosta (LSB_MCPU_HOSTS)"),
        ({**TRAINJOB, "PET_NNODES": "1:4"}, "PET_NNODES is '1:4': it must be a whole number"),
        (
            {**SKYPILOT, "SKYPILOT_NODE_RANK": "2"},
            "node_rank is 2 (SKYPILOT_NODE_RANK): with num_nodes is 2 (SKYPILOT_NODE_IPS)",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(sentence)):
        platforms.find({"CUDA_VISIBLE_DEVICES": "", **variables})


BLAUNCH = """#!/bin/bash
[ "$1" = -no-shell ] || exit 9
host=$2; shift 2; cd /
exec env -i --default-signal PATH=/bin:/usr/bin HOSTNAME="$host" OMP_NUM_THREADS=1 "$@" < /dev/null
"""


LONG = pytest.mark.long


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([{**LSF, "LSB_MCPU_HOSTS": f"{HEAD} 1 other 1"}], id="lsf", marks=LONG),
        pytest.param(
            [{**SKYPILOT, "SKYPILOT_NODE_IPS": f"{HEAD}\nother", "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
             for rank in "01"], id="skypilot", marks=LONG),
        pytest.param(
            [{**TRAINJOB, "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": rank, "PET_MASTER_ADDR": HEAD, "RANK": rank,
              "WORLD_SIZE": "2", "MASTER_ADDR": HEAD, "MASTER_PORT": "29500"} for rank in "01"],
            id="kubeflow", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_two_nodes_train_as_one_process(nodes: list[dict[str, str]], tmp_path: Path) -> None:
    """The nodes are this machine; a script stands in for blaunch and starts the command in a bare environment."""
    short = ["--recipe", "digits", "--trackers", "none", "train.steps=4", "log.every_steps=1"]
    train("cpu", tmp_path / "alone", *short).check()
    (tmp_path / "blaunch").write_text(BLAUNCH)
    (tmp_path / "blaunch").chmod(0o755)
    environment = {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{clean_environment()['PATH']}"}
    command = ["samerun", "launch", "--run-dir", str(tmp_path / "run"), *short]
    for started in [Started(command, env={**environment, **variables}) for variables in nodes]:
        started.wait().check()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
