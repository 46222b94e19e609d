"""Real jobs on a real Slurm: every way to start one gives the 1-process run's losses, and a failure ends it everywhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import slurm_lab
from processes import REPOSITORY, losses, read, train
from slurm_lab import ENDLESS, RECIPE, Lab, assert_ran

_WHY_NOT = slurm_lab.why_not()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

SCRIPT = str(REPOSITORY / "launch" / "multinode.sh")
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


@pytest.mark.parametrize("preset", ["multi_node", pytest.param("deepspeed_zero3", marks=pytest.mark.long)])
def test_sbatch_on_two_nodes_with_two_processes_each(lab: Lab, alone: list[float], tmp_path: Path, preset: str) -> None:
    job = lab.wait(lab.sbatch(SCRIPT, "--preset", preset, "--run-dir", str(tmp_path), *RECIPE))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert_ran(tmp_path, ["node1", "node1", "node2", "node2"], alone, job.output)
    assert read(tmp_path / "run.json")["preset"] == preset
    assert re.search(r"^samerun: Slurm job \d+ on node1, node2; ", job.output, flags=re.MULTILINE), job.output


LANGUAGE = ("--recipe", "lm_tiny", "model.hidden_size=64", "model.layers=2", "data.sequence_length=64",
            "train.global_batch_size=8", "train.steps=5", "train.evaluate_every_steps=null", "train.evaluate_every_epochs=0",
            "train.max_validation_samples=64", "log.every_steps=1")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "told"),
    [
        ("hsdp", {"replicas": 2}),
        pytest.param("tensor_parallel", {"tensor_parallel": 2, "data_ranks": 2}, marks=pytest.mark.long),
    ],
)
def test_a_model_divided_within_nodes_is_that_of_one_process_which_takes_it_up(
    lab: Lab, tmp_path: Path, preset: str, told: dict[str, int]
) -> None:
    train("cpu", tmp_path / "alone", *LANGUAGE).check()
    words = (
        "--preset",
        preset,
        "--run-dir",
        str(tmp_path / "run"),
        "--trackers",
        "none",
        *LANGUAGE,
        "checkpoint.every_steps=3",
    )
    job = lab.wait(lab.sbatch(SCRIPT, *words))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert_ran(tmp_path / "run", ["node1", "node1", "node2", "node2"], losses(tmp_path / "alone"), job.output)
    assert read(tmp_path / "run" / "run.json").items() >= told.items()
    saved = tmp_path / "run" / "checkpoints" / "step-00000003"
    train("cpu", tmp_path / "on", *LANGUAGE, "--resume", str(saved)).check()
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "alone")[3:], rel=1e-5)


@pytest.mark.slow
def test_the_shell_of_salloc(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    """Which runs on no node of the job, and is not told of its GPUs."""
    command = f"samerun launch --run-dir {tmp_path} {shlex.join(RECIPE)}"
    finished = lab.run("salloc", "--nodes=2", "--gres=gpu:1", "bash", "-c", f"{command} --dry-run && {command}").check()
    assert_ran(tmp_path, ["node1", "node2"], alone, finished.output)
    # What --dry-run printed for each node is what ran there.
    for rank, node in enumerate(("node1", "node2")):
        (promised,) = re.findall(rf"^# node {rank}, {node}:\n(.*)$", finished.output, flags=re.MULTILINE)
        assert f"{rank}: samerun: {promised}\n" in finished.output


@pytest.mark.slow
def test_a_job_submitted_from_a_step_of_another_is_a_job_of_its_own(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    """Its environment has the step's nodes and tasks, and the GPUs, tasks and memory that the other job asked for."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexec samerun launch {shlex.join(RECIPE)}\n")
    options = ("--parsable", "--nodes=2", "--nodelist=node1,node2", "--mem=0", "--time=5", f"--chdir={tmp_path}")
    nested = f"srun --ntasks=2 --output={tmp_path}/id-%t sh -c '[ $SLURM_PROCID = 0 ] || sbatch {shlex.join(options)} {script}'"
    other = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--mem=100M", "--time=5")
    assert lab.wait(lab.sbatch(*other, "--wrap", nested)).state == "COMPLETED"
    job = (tmp_path / "id-1").read_text().strip()
    over = lab.wait(job)
    assert (over.state, over.exit_code) == ("COMPLETED", "0:0"), over.output
    assert_ran(tmp_path / f"runs/digits-{job}", ["node1", "node2"], alone, over.output)
    assert "the end of the job's time is unknown" not in over.output


@pytest.mark.slow
def test_two_jobs_at_once_on_the_same_nodes(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    """One of them by its user's own srun, whose tasks have no common parent of ours: they share a key in the run folder."""
    nodes, arguments = ("--nodelist=node[1-2]", *SHARED), shlex.join(RECIPE)
    by_srun = f"exec srun --ntasks-per-node=1 --label samerun launch --run-dir {tmp_path}/b {arguments}"
    ids = [lab.sbatch(*nodes, SCRIPT, "--run-dir", str(tmp_path / "a"), *RECIPE), lab.sbatch(*nodes, "--wrap", by_srun)]
    jobs = [lab.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs
    assert max(job.start_s for job in jobs) < min(job.end_s for job in jobs), "one after the other"
    for name, job in zip(("a", "b"), jobs, strict=True):
        assert_ran(tmp_path / name, ["node1", "node2"], alone, job.output)
        assert list((tmp_path / name).glob(".*")) == []


@pytest.mark.slow
def test_one_task_per_gpu_by_srun(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    command = f"exec srun --gpus-per-task=1 python -m app.train --run-dir {tmp_path} {shlex.join(RECIPE)}"
    tasks = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=2", "--mem=0")
    job = lab.wait(lab.sbatch(*tasks, "--wrap", command))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert_ran(tmp_path, ["node1", "node1", "node2", "node2"], alone, job.output)


def test_a_killed_process_ends_the_job_everywhere_and_is_named(lab: Lab, tmp_path: Path) -> None:
    job = lab.sbatch("--time=5", SCRIPT, "--processes-per-node", "1", "--run-dir", str(tmp_path), *ENDLESS)
    lab.wait_for_output(job, " step 1/")
    struck_s = time.monotonic()
    lab.run("pkill", "--signal", "KILL", "--full", "^[^ ]+ -u [^ ]+ app.train", node="node2").check()
    over = lab.wait(job, timeout_s=30)
    assert time.monotonic() - struck_s < 20
    for node in ("node1", "node2"):
        assert lab.run("pgrep", "--full", "app.train", node=node).returncode == 1, "still running"
    assert (over.state, over.exit_code) == ("FAILED", "137:0"), over.output
    *_, last = over.output.splitlines()
    assert last == "samerun: rank 1 on node2 was ended by SIGKILL, possibly out of memory, and the run with it", over.output


@contextmanager
def listening(lab: Lab, node: str, port: int) -> Iterator[None]:
    """Another program at a port of a node."""
    code = f"import socket, time; s = socket.create_server(('', {port})); print('ready', flush=True); time.sleep(120)"
    listener = subprocess.Popen(
        [REPOSITORY / "tests" / "slurm-lab", "exec", lab.folder, node, "/usr/bin/env", "python3", "-c", code],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        yield
    finally:
        listener.kill()
        listener.communicate()


@pytest.mark.slow
def test_a_clash_of_the_port_made_from_the_job_is_survived(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    options = ("--processes-per-node", "1", "--run-dir", str(tmp_path))
    job = lab.sbatch("--hold", SCRIPT, *options, *RECIPE)
    port = 12000 + int(job)
    with listening(lab, "node1", port):
        lab.run("scontrol", "release", job).check()
        over = lab.wait(job)
    assert over.state == "COMPLETED", over.output
    assert f"--main_process_port {port + 1}" in over.output
    assert_ran(tmp_path, ["node1", "node2"], alone, over.output)


def test_a_job_of_one_process_ends_with_the_exit_code_of_its_run(lab: Lab, tmp_path: Path) -> None:
    nowhere = ("data.source=imagefolder", f"data.path={tmp_path}", "data.image_size=8")
    options = ("--preset", "cpu", "--processes-per-node", "1", "--run-dir", str(tmp_path / "run"))
    job = lab.wait(lab.sbatch("--nodes=1", SCRIPT, *options, *RECIPE, *nowhere))
    assert (job.state, job.exit_code) == ("FAILED", "6:0"), job.output
    assert job.output.splitlines()[-1].startswith("[rank 0 on node1] DataError: "), job.output


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
