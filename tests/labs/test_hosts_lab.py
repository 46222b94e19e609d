"""mpirun and PBS over the hosts of the lab: the 1-process run's losses, and a killed process ends the run on all of them; and a
sweep over them.

Open MPI is the real one; what stands in for ssh gives the other host a bare environment, as sshd does. PBS is replayed: the
environments are those that a real OpenPBS gave a batch script and its tasks, and Slurm's daemon starts what PBS's would.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
import slurm_lab
import trace_format
from processes import REPOSITORY, Started, clean_environment, read, read_lines
from slurm_lab import ENDLESS, RECIPE, STEPS, Lab, assert_ran

from app.reports import timeline

_WHY_NOT = slurm_lab.why_not()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI: run `make lab-packages`")

MPIRUN = str(REPOSITORY / "launch" / "mpirun.sh")
PBS = str(REPOSITORY / "launch" / "multinode.pbs")
CAPTURED = REPOSITORY / "tests" / "environments" / "pbs"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FOUR = ["node1", "node1", "node2", "node2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("hosts") / "lab"
    with slurm_lab.lab(folder, tmp_path_factory.mktemp("outputs"), nodes=2, gpus_per_node=0) as up:
        yield up
    assert slurm_lab.left_over(folder) == []


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The hosts, with nothing that trains on them when the test is over, however it went."""
    yield cluster
    cluster.cancel_all()
    for node in ("node1", "node2"):
        cluster.run("pkill", "--signal", "KILL", "--full", "app.train", node=node)


def assert_a_killed_rank_ends_it(lab: Lab, started: Started, run_dir: Path) -> str:
    """Kill a rank on node2 when they train, see all of it over on both hosts, and return what was printed."""
    deadline_s = time.monotonic() + 120
    while not ((run_dir / "metrics.jsonl").exists() and read_lines(run_dir / "metrics.jsonl")):
        if started.is_over() or time.monotonic() > deadline_s:
            pytest.fail(started.wait(timeout_s=1).output)
        time.sleep(0.2)
    lab.run("pkill", "--signal", "KILL", "--full", "--oldest", "^[^ ]+ (-u )?[^ ]+ app.train", node="node2").check()
    finished = started.wait(timeout_s=20)
    assert finished.returncode != 0, finished.output
    for node in ("node1", "node2"):
        assert lab.run("pgrep", "--full", "app.train", node=node).returncode == 1, "still running"
    return finished.output


# Open MPI ------------------------------------------------------------------------------------------------------------------


def mpirun(lab: Lab, folder: Path, *arguments: str) -> Started:
    """`launch/mpirun.sh` for 2 processes on each of 2 hosts that nothing but their names is known of."""
    agent = folder / "ssh"
    enter = shlex.join([str(REPOSITORY / "tests" / "slurm-lab"), "exec", str(lab.folder)])
    agent.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done # options of ssh
host=$1; shift
exec {enter} "$host" env -i HOME="$HOME" PATH=/usr/bin:/bin OMP_WAIT_POLICY=passive sh -c "cd; $*"
""")
    agent.chmod(0o755)
    command = f"mpirun --bind-to none --host node1:2,node2:2 --mca plm_rsh_agent {agent}"
    return lab.start(MPIRUN, *arguments, env={"NP": "4", "MASTER_ADDR": "node1", "MPIRUN": command, **AS_ROOT})


@pytest.mark.slow
@needs_mpirun
def test_mpirun_over_two_hosts(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    finished = mpirun(lab, tmp_path, "--run-dir", str(tmp_path / "run"), *RECIPE).wait().check()
    assert_ran(tmp_path / "run", FOUR, alone, finished.output)
    assert f" step {STEPS}/{STEPS} " in finished.output  # lines for a log, although mpirun gives the processes a terminal
    assert "\x1b" not in finished.output


@needs_mpirun
@pytest.mark.slow
def test_mpirun_in_a_slurm_job(lab: Lab, alone: list[float], tmp_path: Path) -> None:
    """By Slurm's own launcher, and the job tells the head; Slurm's rank is that of mpirun's daemon, not the process's."""
    said = shlex.join(f"{name}={value}" for name, value in {"NP": "4", **AS_ROOT}.items())
    command = f"exec env {said} {MPIRUN} --run-dir {tmp_path} {shlex.join(RECIPE)}"
    job = lab.wait(lab.sbatch("--nodes=2", "--ntasks-per-node=2", "--wrap", command))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert_ran(tmp_path, FOUR, alone, job.output)


@needs_mpirun
@pytest.mark.long
def test_a_killed_process_ends_mpirun_on_both_hosts(lab: Lab, tmp_path: Path) -> None:
    started = mpirun(lab, tmp_path, "--run-dir", str(tmp_path / "run"), *ENDLESS)
    assert "on node node2 exited on signal 9 (Killed)" in assert_a_killed_rank_ends_it(lab, started, tmp_path / "run")


# PBS -----------------------------------------------------------------------------------------------------------------------


def captured(name: str, **changed: str) -> list[str]:
    """Arguments of `env -i`: a captured environment in which the places are those of this machine."""
    variables = processes.captured(f"pbs/{name}")
    kept = {name: value for name, value in changed.items() if name in variables or not name.startswith("PBS_")}
    return [f"{name}={value}" for name, value in {**variables, **kept}.items()]


def qsub(lab: Lab, folder: Path, *arguments: str) -> Started:
    """Start the batch script as PBS does on the first host of a job of `select=2:ncpus=2:mpiprocs=2`."""
    nodefile, remote_shell = folder / "nodefile", folder / "bin" / "pbs_tmrsh"
    shutil.copy(CAPTURED / "nodefile-select-2x2.txt", nodefile)
    home = os.environ["HOME"]
    # Those of the tests as by `qsub -v`, which reaches tasks as well.
    carried = {name: clean_environment()[name] for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "OMP_WAIT_POLICY")}
    here = {"PBS_NODEFILE": str(nodefile), "HOME": home, "TMPDIR": str(folder), **carried}
    tasks = {"node1": "select-2x2-pbsdsh-task00000002", "node2": "select-2x2-pbsdsh-task20000001"}
    choices = " ".join(f'{host}) set -- {shlex.join(captured(task, **here))} "$@" ;;' for host, task in tasks.items())
    remote_shell.parent.mkdir()
    remote_shell.write_text(f"""#!/bin/sh
host=$1; shift; case $host in {choices} esac
export SLURM_CONF={lab.folder}/etc/slurm.conf
exec srun --quiet --nodes=1 --ntasks=1 --nodelist="$host" --chdir={home} /usr/bin/env -i "$@"
""")
    remote_shell.chmod(0o755)
    path = f"{remote_shell.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    said = {"SAMERUN_ARGS": shlex.join(arguments), "PBS_O_WORKDIR": str(REPOSITORY), "PBS_O_PATH": path}
    batch = captured("select-2x2-batch", **here, **said)
    return lab.start("/usr/bin/env", "-i", "-C", home, *batch, "/bin/bash", PBS, node="node1")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["multi_node", pytest.param("deepspeed_zero3", marks=pytest.mark.long)])
def test_qsub_on_two_hosts(lab: Lab, alone: list[float], tmp_path: Path, preset: str) -> None:
    arguments = ("--preset", preset, "--run-dir", str(tmp_path / "run"), *RECIPE, "profile.steps=2:4")
    finished = qsub(lab, tmp_path, *arguments).wait().check()
    assert_ran(tmp_path / "run", FOUR, alone, finished.output)
    assert_one_timeline(tmp_path / "run" / "profile")
    assert read(tmp_path / "run" / "run.json")["preset"] == preset
    assert "samerun: PBS job 3.head on node1, node2; " in finished.output


def assert_one_timeline(folder: Path) -> None:
    """All ranks of both hosts are on one time axis, which is true here, where both have the same clock."""
    lines = timeline.merge(folder)
    events = trace_format.load(folder / timeline.TIMELINE)
    assert trace_format.processes(events) == [f"rank {rank} on {host}, cpu" for rank, host in enumerate(FOUR)]
    errors_us = [rank["clock_error_ns"] / 1000 for rank in read(folder / "ranks.json")["ranks"]]
    assert errors_us[0] == errors_us[1] == 0.0 < errors_us[2] == errors_us[3]
    assert trace_format.check_one_axis(events, ranks=4, error_us=errors_us[2]) == 3
    assert lines[0] == f"the clocks of other hosts are known to {errors_us[2] / 1000:.2f} ms"


@pytest.mark.slow
def test_a_killed_process_ends_the_pbs_job_on_both_hosts(lab: Lab, tmp_path: Path) -> None:
    started = qsub(lab, tmp_path, "--run-dir", str(tmp_path / "run"), *ENDLESS)
    output = assert_a_killed_rank_ends_it(lab, started, tmp_path / "run")
    assert "samerun: node2 ended with exit code" in output
    assert output.splitlines()[-1].startswith("samerun: rank 2 on node2 was ended by SIGKILL"), output


# Scaling -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_in_an_allocation_runs_on_as_many_of_its_nodes_as_are_asked_for(lab: Lab, tmp_path: Path) -> None:
    """Really on both; that the one of --nodes 1 would be the first is printed."""
    out, samerun = tmp_path / "out", f"{sys.executable} -m launch.cli"
    sizes = "--nodes 2 --devices 1 --repeats 1 --steps 3 --warm-up-steps 2"
    command = f"{samerun} scale --recipe digits {sizes} --out {out} && {samerun} launch --nodes 1 --dry-run"
    finished = lab.run("salloc", "--nodes=2", "sh", "-c", command).check()
    header, row = (line.split(",") for line in (out / "scaling.csv").read_text().splitlines())
    values = dict(zip(header, row, strict=True))
    assert (values["nodes"], values["processes_per_node"], values["devices"], values["runs"]) == ("2", "1", "2", "1")
    assert [rank.split()[0] for rank in read(out / "multi_gpu-2x1-1" / "run.json")["ranks"]] == ["node1", "node2"]
    assert float(values["samples_per_s"]) > 0
    assert "srun --nodes=1 --ntasks=1 " in finished.output
    assert "# node 0, node1:\n" in finished.output
    assert "# node 1" not in finished.output
