"""Jobs that `samerun submit` hands to a real Slurm."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import slurm_lab
from processes import REPOSITORY, read

_WHY_NOT = slurm_lab.why_not()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

REAL = ("--time", "00:05:00", "--preset", "multi_node", "train.steps=3", "log.every_steps=1")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    with slurm_lab.lab(folder, tmp_path_factory.mktemp("outputs"), nodes=2, gpus_per_node=2) as up:
        yield up
        up.cancel_all()


def submitted(lab, folder, *arguments, samerun=(sys.executable, "-m", "launch.cli"), env=None):
    """Submit on the head node, from a folder of the user's, and return the id."""
    folder.mkdir()
    command = f"cd {shlex.quote(str(folder))} && exec {shlex.join([*samerun, 'submit', *arguments])}"
    finished = lab.run("sh", "-c", command, env=env).check()
    return finished.output.splitlines()[-1], finished.output


def test_a_job_submitted_from_a_wheel_trains_in_containers_on_two_nodes(lab, installed, tmp_path, tmp_path_factory):
    folder, env = tmp_path / "a project", slurm_lab.container_environment(installed, tmp_path_factory.getbasetemp())
    options = ("--nodes", "2", "--gpus-per-node", "1", "--container-image", str(installed.parent), *REAL)
    job_id, said = submitted(lab, folder, *options, "--", "--trackers", "none", samerun=("samerun",), env=env)
    job = lab.wait(job_id)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert " apptainer exec " in job.output
    assert str(REPOSITORY / "launch") not in job.output
    run_dir, log = (re.findall(rf"{what} (runs/\S+?)(?:,|$)", said, flags=re.MULTILINE)[0] for what in ("run folder", "log"))
    result = read(folder / run_dir / "result.json")
    assert (result["steps"], result["world_size"], result["preset"]) == (3, 2, "multi_node")
    assert [rank.split()[0] for rank in read(folder / run_dir / "run.json")["ranks"]] == ["node1", "node2"]
    assert (folder / log).read_text() == job.output != ""


@pytest.mark.slow
def test_an_array_of_two_gives_two_run_folders(lab, tmp_path):
    """Each on one node that it shares with the other's, side by side."""
    folder = tmp_path / "project"
    shared = ("--sbatch-option=--oversubscribe", "--sbatch-option=--mem=4G", "--cpus-per-node", "2", "--run-dir", "seeds")
    job_id, _ = submitted(lab, folder, "--nodes", "1", *REAL, *shared, "--array", "seed=1,2", "--", "--trackers", "none")
    jobs = [lab.wait(f"{job_id}_{index}") for index in (0, 1)]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs
    assert sorted(path.name for path in (folder / "seeds").iterdir()) == ["seed=1", "seed=2"]
    losses = [read(folder / "seeds" / name / "result.json")["test_loss"] for name in ("seed=1", "seed=2")]
    assert losses[0] != losses[1]
    for name, job, seed in zip(("seed=1", "seed=2"), jobs, (1, 2), strict=True):
        assert f"seed: {seed}\n" in (folder / "seeds" / name / "recipe.yaml").read_text()
        assert f"task {seed - 1} of the array: seed={seed}\n" in job.output
