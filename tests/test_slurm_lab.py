"""Real jobs on a real Slurm: every way to start one gives the 1-process run's losses, and a failure ends it everywhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_lab
from processes import REPOSITORY, read, read_lines, train
from slurm_lab import Lab

_WHY_NOT = slurm_lab.why_not()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

SCRIPT = str(REPOSITORY / "launch" / "multinode.sh")
STEPS = 5
# 48 samples can be divided by 1, 2, 3 and 4 processes.
RECIPE = ("--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=48", "log.every_steps=1", "--trackers", "none")
SHARED = ("--oversubscribe", "--mem=4G", "--gpus-per-node=1", "--time=5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with slurm_lab.lab(folder, tmp_path_factory.mktemp("outputs"), nodes=3, gpus_per_node=2) as up:
        yield up
    assert slurm_lab.left_over(folder) == []


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The cluster, with nothing in its queue when the test is over, however it went."""
    yield cluster
    cluster.cancel_all()


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, on this machine."""
    run_dir = tmp_path_factory.mktemp("alone")
    train("cpu", run_dir, *RECIPE[:-2]).check()
    assert len(losses(run_dir)) == STEPS
    return losses(run_dir)


def assert_ran(run_dir: Path, hosts: list[str], alone: list[float], output: str) -> None:
    assert [rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]] == hosts, output
    assert losses(run_dir) == pytest.approx(alone, rel=1e-5), output


@pytest.mark.parametrize("preset", ["multi_node", "deepspeed_zero3"])
def test_sbatch_on_two_nodes_with_two_processes_each(lab: Lab, alone: list[float], tmp_path: Path, preset: str) -> None:
    job = lab.wait(lab.sbatch(SCRIPT, "--preset", preset, "--run-dir", str(tmp_path), *RECIPE))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert_ran(tmp_path, ["node1", "node1", "node2", "node2"], alone, job.output)
    assert read(tmp_path / "run.json")["preset"] == preset
    assert re.search(r"^samerun: Slurm job \d+ on node1, node2; ", job.output, flags=re.MULTILINE), job.output


def test_sbatch_on_three_nodes_with_one_process_each(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    options = ("--processes-per-node", "1", "--run-dir", str(tmp_path))
    job = lab.wait(lab.sbatch("--nodes=3", SCRIPT, *options, *RECIPE))
    assert job.state == "COMPLETED", job.output
    assert_ran(tmp_path, ["node1", "node2", "node3"], alone, job.output)


def test_the_shell_of_salloc(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    """Which runs on no node of the job, and is not told of its GPUs."""
    command = f"samerun launch --run-dir {tmp_path} {shlex.join(RECIPE)}"
    finished = lab.run("salloc", "--nodes=2", "--gres=gpu:1", "bash", "-c", f"{command} --dry-run && {command}").check()
    assert_ran(tmp_path, ["node1", "node2"], alone, finished.output)
    # What --dry-run printed for each node is what ran there.
    for rank, node in enumerate(("node1", "node2")):
        (promised,) = re.findall(rf"^# node {rank}, {node}:\n(.*)$", finished.output, flags=re.MULTILINE)
        assert f"{rank}: samerun: {promised}\n" in finished.output


def test_an_array_of_two_on_one_node(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    command = f"exec samerun launch --processes-per-node 2 --run-dir {tmp_path}/$SLURM_ARRAY_TASK_ID {shlex.join(RECIPE)}"
    array = lab.sbatch("--array=0-1", "--nodes=1", "--cpus-per-task=2", "--nodelist=node2", "--wrap", command)
    jobs = [lab.wait(f"{array}_{index}") for index in (0, 1)]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs
    assert max(job.start_s for job in jobs) < min(job.end_s for job in jobs), "one after the other"
    for index, job in enumerate(jobs):
        assert_ran(tmp_path / str(index), ["node2", "node2"], alone, job.output)


def test_two_jobs_at_once_on_the_same_nodes(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    ids = [
        lab.sbatch("--nodelist=node[1-2]", *SHARED, SCRIPT, "--run-dir", str(tmp_path / name), *RECIPE) for name in ("a", "b")
    ]
    jobs = [lab.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs
    assert max(job.start_s for job in jobs) < min(job.end_s for job in jobs), "one after the other"
    for name, job in zip(("a", "b"), jobs, strict=True):
        assert_ran(tmp_path / name, ["node1", "node2"], alone, job.output)


def test_a_killed_process_ends_the_job_everywhere(lab: Lab, tmp_path: Path) -> None:
    endless = ("--recipe", "digits", "train.steps=1000000", "log.every_steps=1", "--trackers", "none")
    job = lab.sbatch("--time=5", SCRIPT, "--processes-per-node", "1", "--run-dir", str(tmp_path), *endless)
    lab.wait_for_output(job, " step 1/")
    killed_s = time.monotonic()
    lab.run("pkill", "--signal", "KILL", "--full", "^[^ ]+ -u -m app.train", node="node2").check()
    over = lab.wait(job, timeout_s=30)
    assert time.monotonic() - killed_s < 20
    assert over.state == "FAILED", over
    assert not over.exit_code.startswith("0:"), over
    for node in ("node1", "node2"):
        assert lab.run("pgrep", "--full", "app.train", node=node).returncode == 1, "still running"


def test_a_port_in_use_is_said_before_anything_is_imported(lab: Lab, tmp_path: Path) -> None:
    listen = (
        "import socket, time; s = socket.socket(); s.bind(('', 23456)); s.listen(); print('ready', flush=True); time.sleep(60)"
    )
    listener = subprocess.Popen(
        [REPOSITORY / "tests" / "slurm-lab", "exec", lab.folder, "node1", "/usr/bin/env", "python3", "-c", listen],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        job = lab.wait(lab.sbatch(SCRIPT, "--port", "23456", "--run-dir", str(tmp_path), *RECIPE), timeout_s=60)
    finally:
        listener.kill()
        listener.communicate()
    assert job.state == "FAILED", job
    assert "TopologyError: port is 23456 (--port) is in use on node1, node 0: choose a free one with --port N" in job.output
    assert job.end_s - job.start_s < 20


def test_a_job_with_unequal_nodes_is_refused_with_the_choices(lab: Lab) -> None:
    job = lab.wait(lab.sbatch("--nodes=2", "--gpus=3", "--wrap", "exec samerun launch"), timeout_s=30)
    assert (job.state, job.exit_code) == ("FAILED", "5:0"), job
    assert "ask for --gpus-per-node=1" in job.output


def test_a_lab_whose_tests_were_killed_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    owner = subprocess.Popen(["sleep", "600"])
    try:
        slurm_lab.up(folder, nodes=1, gpus_per_node=0, owner=owner.pid)
        assert slurm_lab.left_over(folder)
    finally:
        owner.kill()
        owner.wait()
    deadline_s = time.monotonic() + 30
    while slurm_lab.left_over(folder) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert slurm_lab.left_over(folder) == []
