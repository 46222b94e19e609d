"""Nodes on which a run continues after a loss, with scripted answers of srun and scontrol. Real losses: test_spares_lab.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from processes import captured

from launch.run_module import program
from launch.start import spares
from launch.start.resolved import Resolved, checked

BATCH = captured("slurm/cpucluster-2node-batch")
ANSWERS = {
    "srun": 'case " $* " in *[=,]$LOST[,\\ ]*) echo "srun: error: Task launch failed on node $LOST" >&2; exit 233;; esac',
    "scontrol": 'echo "$@" >> requests; echo "JobId=12 JobState=RUNNING Restarts=0 ReqNodeList=node[1-3] NodeList=node[2-3]"',
}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a batch script on the first of 6 nodes, with these programs of Slurm."""
    for name, lines in ANSWERS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOST": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    nodes = {"SLURM_JOB_NUM_NODES": "6", "SLURM_JOB_NODELIST": "node[1-6]", "SLURM_TASKS_PER_NODE": "1(x6)"}
    return {**BATCH, **nodes, "SLURM_JOB_CPUS_PER_NODE": "4(x6)"}


def resolved(environment: dict[str, str], *options: str) -> Resolved:
    return checked([*options, "--recipe", "digits", "train.global_batch_size=48"], environment)


@pytest.mark.parametrize(
    ("options", "losses", "expected"),
    [
        ("--spares 2", "2", "1,3,4,5; 6"),
        ("--spares 2", "5", "1,2,3,4; 6"),
        ("--spares 2", "2 6", "1,3,4,5; "),
        ("--spares 2", "2 6 3", ""),
        ("--spares 2", "1", ""),
        ("--spares 2 --min-nodes 3", "2,3,4", "1,5,6; "),
        ("--min-nodes 2", "6", "1,2,3,4; 5"),
        ("--min-nodes 2", "6 5 4 3", "1,2; "),
        ("--min-nodes 5", "6", ""),
        ("--min-nodes 1", "2,3,4,5,6", "1; "),
    ],
)
def test_a_run_continues_on_the_most_nodes_that_divide_its_batch(
    environment: dict[str, str], options: str, losses: str, expected: str
) -> None:
    left: Resolved | None = resolved(environment, *options.split())
    for lost in losses.split():
        assert left is not None
        left = spares.without(left, [f"node{number}" for number in lost.split(",")], environment)
    found = [",".join(names).replace("node", "") for names in (left.topology.hosts, left.spares)] if left else []
    assert "; ".join(found) == expected
    if left:
        used = left.topology.hosts
        assert {f"--nodes={len(used)}", f"--nodelist={','.join(used)}", "--overlap"} <= set(left.start_argv())
        assert left.plan.data_ranks == len(used)


def test_the_nodes_on_which_srun_starts_nothing_are_lost_and_recorded(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spare, errors = resolved(environment, "--spares", "2"), tmp_path / "run" / "errors" / "attempt"
    errors.parent.parent.mkdir()
    assert spares.lost_nodes(with_spare, errors, environment) == []
    monkeypatch.setenv("LOST", "node6")
    assert spares.lost_nodes(with_spare, errors, environment) == [], "a spare alone"
    monkeypatch.setenv("LOST", "node3")
    assert spares.lost_nodes(with_spare, errors, environment) == ["node3"]
    assert json.loads((errors / "lost-node3.json").read_text())["error"].startswith("the node is lost")
    assert spares.lost_nodes(resolved(environment), errors, environment) == [], "a run without spares probes nothing"


@pytest.mark.usefixtures("environment")
def test_a_guard_requeues_a_job_that_has_lost_its_first_node(tmp_path: Path) -> None:
    command = [*program("launch.start.spares"), "node1", "12", "12", "0"]
    subprocess.run(command, check=True, timeout=30)
    assert (tmp_path / "requests").read_text().splitlines()[-2:] == ["requeue 12", "update JobId=12 StartTime=now+15"]
