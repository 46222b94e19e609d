"""Jobs of a real Slurm that end before their run does: by a time limit, a hand, a lost node. Each run is finished all the same.

Runs that train are compared with the undisturbed one. What only concerns the queue is tried with a stand-in for the training
(tests/scripts/in_place), which starts at once.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import slurm_lab
from processes import REPOSITORY, losses, read, train
from slurm_lab import Job, Lab

_WHY_NOT = slurm_lab.why_not()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

SCRIPT = str(REPOSITORY / "launch" / "multinode.sh")
SHARED = ("--oversubscribe", "--mem=4G")
# The weights move so little that the order of additions is not amplified.
STEPS = 60
NODES = 8
RECIPE = ("--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=48", "log.every_steps=1", "optim.lr=1e-4",
          "train.evaluate_every_epochs=0", "checkpoint.every_steps=5")  # fmt: skip


# Many small passes for a step, so that there is time to strike.
SLOWLY = (*RECIPE, "train.max_micro_batch=1", "--trackers", "none")


@dataclass(frozen=True)
class Limited:
    """A job that its time limit ends, which takes minutes: it waits for that beside the other tests."""

    job: str
    run_dir: Path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train("cpu", run_dir, *RECIPE).check()
    assert len(losses(run_dir)) == STEPS
    return losses(run_dir)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with slurm_lab.lab(folder, tmp_path_factory.mktemp("outputs"), nodes=NODES, gpus_per_node=0) as up:
        yield up
    assert slurm_lab.left_over(folder) == []


@pytest.fixture(scope="module")
def limited(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Limited:
    """It does something else first: when it begins, hardly more is left of its 2 minutes than half a minute kept for saving."""
    run_dir = tmp_path_factory.mktemp("limited") / "run"
    script = run_dir.with_name("job.sh")
    script.write_text(f'#!/bin/sh\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 85\nexec {SCRIPT} "$@"\n')
    options = ("--nodes=2", "--ntasks-per-node=1", "--nodelist=node[1-2]", "--time=2", "--requeue", "--open-mode=append")
    return Limited(lab.sbatch(*SHARED, *options, str(script), "--run-dir", str(run_dir), *SLOWLY), run_dir)


# The queue -----------------------------------------------------------------------------------------------------------------


def submit(lab: Lab, happens: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """A job on one node with the stand-in for the training."""
    said = f"--export=ALL,PYTHONPATH={REPOSITORY}/tests/scripts/in_place:{REPOSITORY},IN_PLACE={happens}"
    return lab.sbatch(*SHARED, "--nodes=1", "--time=5", said, *options, SCRIPT, *arguments)


def starts(job: Job) -> list[str]:
    return [line.partition(" from step ")[2].partition(",")[0] for line in job.output.splitlines() if " from step " in line]


def test_jobs_that_stop_are_run_again_and_only_they(lab: Lab, tmp_path: Path) -> None:
    """An array's tasks by themselves: the last one has the array's own id, by which all would be requeued."""
    array = submit(lab, "stop 30", options=("--array=3-4", f"--chdir={tmp_path}"))
    signalled = submit(lab, "nothing 1", "--run-dir", str(tmp_path / "signalled"))
    cancelled = submit(lab, "nothing 1", "--run-dir", str(tmp_path / "cancelled"))
    failed = submit(lab, "mistake 10", "--run-dir", str(tmp_path / "failed"), "--max-restarts", "3")
    forbidden = submit(lab, "stop 10", "--run-dir", str(tmp_path / "forbidden"), "--max-requeues", "0")
    lab.wait_for_output(signalled, "from step 0")
    lab.run("scancel", "--signal=USR1", signalled).check()
    lab.wait_for_output(cancelled, "from step 0")
    lab.run("scancel", cancelled).check()

    over = lab.wait(cancelled)
    assert (over.state, starts(over)) == ("CANCELLED", ["0"]), over.output
    assert f"Slurm was ending job {cancelled}, for example after scancel" in over.output
    assert "got SIGTERM: the run saves a checkpoint and stops. If the log ends here, resume it: samerun" in over.output
    over = lab.wait(failed)
    assert (over.state, starts(over)) == ("FAILED", ["0"]), over.output
    over = lab.wait(forbidden)
    # Stopped and in no queue: what has `afterok` on it must not begin.
    assert (over.state, over.exit_code, starts(over)) == ("FAILED", "75:0", ["0"]), over.output
    assert f"To resume it: samerun launch --run-dir {tmp_path}/forbidden" in over.output
    over = lab.wait(signalled)
    assert over.state == "COMPLETED", over.output
    assert len(starts(over)) == 2
    for index in (3, 4):
        over = lab.wait(f"{array}_{index}")
        assert (over.state, starts(over)) == ("COMPLETED", ["0", "30"]), over.output
        assert f"Slurm requeues job {array}_{index}, 1 of at most 20 times" in over.output
        assert read(tmp_path / f"runs/digits-{array}_{index}/outcome.json")["outcome"] == "finished"


def test_nothing_is_left_of_a_step_whose_samerun_is_killed(lab: Lab, tmp_path: Path) -> None:
    """In the shell of salloc, which is on no node of the job: nobody but Slurm reaches the processes of the step from there."""
    said = {"PYTHONPATH": f"{REPOSITORY}/tests/scripts/in_place:{REPOSITORY}", "IN_PLACE": "nothing 1"}
    options = (*SHARED, "--nodes=1", "--time=5")
    started = lab.start("salloc", *options, "samerun", "launch", "--run-dir", str(tmp_path / "run"), env=said)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "run" / "steps").exists():
        assert time.monotonic() < deadline_s, started.kill().output
        time.sleep(0.05)
    (samerun,) = [process for process in started.processes() if process.parent().name() == "salloc"]
    ranks = [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path / "run") in (process.info["cmdline"] or ())
    ]
    assert len(ranks) >= 4  # samerun and srun here, samerun, its launcher and the rank there
    samerun.kill()
    assert psutil.wait_procs(ranks, timeout=15)[1] == []
    started.wait()


# Runs ----------------------------------------------------------------------------------------------------------------------


def wait_for_checkpoint(lab: Lab, job: str, run_dir: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not list((run_dir / "checkpoints").glob("step*")):
        assert time.monotonic() < deadline_s, lab.output(job)
        time.sleep(0.05)


def wait_for_queue(lab: Lab, job: str) -> None:
    """Wait until Slurm has put it back, which holds a job for 2 minutes when it does so by itself, and end that."""
    deadline_s = time.monotonic() + 120
    while (facts := lab.facts(job))["JobState"] != "PENDING":
        assert time.monotonic() < deadline_s, lab.output(job)
        assert facts["JobState"] in ("RUNNING", "COMPLETING"), lab.output(job)
        time.sleep(0.2)
    lab.run("scontrol", "update", f"JobId={job}", "StartTime=now").check()


def assert_finished(over: Job, run_dir: Path, undisturbed: list[float]) -> None:
    assert over.state == "COMPLETED", over.output
    assert read(run_dir / "outcome.json")["outcome"] == "finished"
    assert 0 < read(run_dir / "run.json")["resumed_step"] < STEPS, over.output
    assert losses(run_dir) == pytest.approx(undisturbed, rel=1e-5), over.output


@pytest.mark.slow
def test_a_lost_node_and_a_cut_cable_end_in_finished_runs(lab: Lab, undisturbed: list[float], tmp_path: Path) -> None:
    """The processes behind the cut cable live on while the job is run again elsewhere, over the same run folder."""
    jobs = {}
    for how, others in (("power", "1-2,6-8"), ("link", "1-5")):
        options = (*SHARED, f"--exclude=node[{others}]", "--time=20")
        jobs[how] = lab.sbatch(*options, SCRIPT, "--run-dir", str(tmp_path / how), *SLOWLY)
    for how, job in jobs.items():
        wait_for_checkpoint(lab, job, tmp_path / how)
        _, second = (rank.split()[0] for rank in read(tmp_path / how / "run.json")["ranks"])
        lab.lose(second, how)
    for job in jobs.values():
        wait_for_queue(lab, job)
    for how, job in jobs.items():
        assert_finished(lab.wait(job), tmp_path / how, undisturbed)


# Containers ----------------------------------------------------------------------------------------------------------------


class Containers:
    """Jobs in containers, of a user who has Samerun from a wheel on the host and in the image."""

    def __init__(self, lab: Lab, installed: Path, hidden: Path) -> None:
        self._lab, self._environment, self.image = lab, slurm_lab.container_environment(installed, hidden), installed.parent

    def run(self, folder: Path, *command: str, **variables: str) -> str:
        """Run a command in a folder of the head node, and return the last word of its output."""
        script = f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}"
        return self._lab.run("sh", "-c", script, env=self._environment | variables).check().output.split()[-1]

    def submit(self, folder: Path, *options: str, **variables: str) -> str:
        """Submit a run on two nodes whose folder is next to the working folder, and return the job's id."""
        shared = ("--cpus-per-node", "2", "--sbatch-option=--oversubscribe", "--sbatch-option=--mem=4G")
        run = ("--run-dir", str(folder.with_name("run")), "--container-image", str(self.image), *SLOWLY[:-2])
        return self.run(folder, "samerun", "submit", "--nodes", "2", *shared, *options, *run, "--", *SLOWLY[-2:], **variables)


@pytest.fixture
def containers(lab: Lab, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Containers:
    return Containers(lab, installed, tmp_path_factory.getbasetemp())


@pytest.mark.long
def test_a_signal_reaches_a_run_in_containers(
    lab: Lab, containers: Containers, undisturbed: list[float], tmp_path: Path
) -> None:
    folder, run_dir = tmp_path / "a project", tmp_path / "run"
    folder.mkdir()
    job = containers.submit(folder, "--time", "00:10:00")
    wait_for_checkpoint(lab, job, run_dir)
    lab.run("scancel", "--signal=USR1", job).check()
    over = lab.wait(job)
    assert_finished(over, run_dir, undisturbed)
    assert f"(SIGUSR1 was received); Slurm requeues job {job}, 1 of at most 20 times" in over.output
    assert len({rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]}) == 2


@pytest.mark.long
def test_a_time_limit_in_containers_ends_in_a_finished_run(
    lab: Lab, containers: Containers, undisturbed: list[float], tmp_path: Path
) -> None:
    """Also with the script of docs/containers.md. The images take most of the time of the job, as in `limited`."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (REPOSITORY / "docs/containers.md").read_text(), flags=re.DOTALL)
    script = script.replace("IMAGE", str(containers.image)).replace("--recipe digits", shlex.join(SLOWLY))
    submitted, own, slow = tmp_path / "submitted" / "project", tmp_path / "own", {"SLOW_IMAGE": "130"}
    submitted.mkdir(parents=True)
    own.mkdir()
    (own / "job.sh").write_text(script)
    options = (*SHARED, "--gpus-per-node=0", "--cpus-per-task=2", "--time=3")
    jobs = {
        submitted.with_name("run"): containers.submit(submitted, "--time", "00:03:00", **slow),
        own / "runs" / "big": containers.run(own, "sbatch", "--parsable", *options, "job.sh", **slow),
    }
    for run_dir, job in jobs.items():
        assert_finished(lab.wait(job), run_dir, undisturbed)


@pytest.mark.long
def test_a_time_limit_ends_in_a_finished_run(lab: Lab, limited: Limited, undisturbed: list[float]) -> None:
    over = lab.wait(limited.job)
    assert_finished(over, limited.run_dir, undisturbed)
    assert "the allocation ends in" in over.output
    assert f"Slurm requeues job {limited.job}" in over.output
