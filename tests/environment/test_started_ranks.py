"""One process per rank, translated: environments captured from real mpirun, mpiexec and srun.

The golden file holds what every captured rank becomes; after an intended change:
    PYTHONPATH=. python tests/environment/test_started_ranks.py > tests/golden/started_ranks.txt
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from processes import REPOSITORY, captured

from app.environment import started_ranks
from app.errors import TopologyError

CAPTURED = Path(__file__).parents[1] / "environments" / "tasks"
GOLDEN = Path(__file__).parents[1] / "golden" / "started_ranks.txt"
STARTS = sorted({path.stem.rpartition("-rank")[0] for path in CAPTURED.glob("*-rank*.txt")})
FILES = {"/var/spool/pbs/aux/5.head": "node1\nnode1\nnode2\nnode2\n"}


def environments(start):
    """The environment of every rank of a start, in the order of the file names."""
    for path in sorted(CAPTURED.glob(f"{start}-rank*.txt")):
        yield captured(f"tasks/{path.stem}")


def translated(environment, **said):
    return started_ranks.translate(environment | said, read=FILES.__getitem__)


def without_head(environment):
    """The job's script had set these, for its own program."""
    return {name: value for name, value in environment.items() if not name.startswith("MASTER_")}


def golden_lines():
    yield "# what each captured rank becomes; MASTER_ADDR and MASTER_PORT of the job's script left out"
    for start in STARTS:
        yield f"\n{(CAPTURED / f'{start}-rank0.txt').read_text().splitlines()[0]}"
        for environment in map(without_head, environments(start)):
            try:
                rank = translated(environment)
            except TopologyError as error:
                yield f"refused: {error}"
                continue
            variables = " ".join(f"{name}={value}" for name, value in rank.variables.items())
            yield f"{variables}  ({rank.starter})"


def test_every_captured_rank_becomes_what_the_golden_file_says():
    assert sum(1 for start in STARTS for _ in environments(start)) >= 25
    assert "\n".join(golden_lines()).splitlines() == GOLDEN.read_text().splitlines()


def test_a_given_meeting_point_is_taken():
    for environment in environments("hydra"):
        variables = translated(environment, MASTER_ADDR="node1", MASTER_PORT="1234").variables
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node1", "1234")
    environment = without_head(next(environments("srun-pmi2")))
    assert translated(environment, SAMERUN_HOST_SUFFIX="i").variables["MASTER_ADDR"] == "node1i"


# What nobody could capture here --------------------------------------------------------------------------------------------

PALS = {"PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_RANK": "5",
        "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PALS_APID": "a1b2",
        "PBS_JOBID": "9.polaris"}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        (PALS, "mpiexec (PALS)"),
        ({name: value for name, value in PALS.items() if name[:5] != "PALS_"}, "mpiexec (Cray PMI)"),
        ({f"MV2_COMM_WORLD_{name}": value for name, value in
          {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()}, "mpirun (MVAPICH2)"),
    ],
)  # fmt: skip
def test_starters_as_they_are_described(environment, starter):
    rank = started_ranks.translate(environment | {"PBS_NODEFILE": "file"}, read=lambda path: "x1.site\nx2.site\n")
    assert (rank.starter, rank.local_rank) == (starter, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [rank.variables[name] for name in names] == ["5", "8", "1", "4", "x1.site"]


def test_a_nodefile_that_is_not_on_this_host_is_as_if_not_there():
    with pytest.raises(TopologyError, match=r"it is unknown which"):
        started_ranks.translate(PALS | {"PBS_NODEFILE": "/no/such/file"})


# Nothing to translate, and what cannot be ----------------------------------------------------------------------------------


def test_processes_that_nobody_started_together_are_none():
    assert translated(next(environments("slurm-mpirun")), OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_LOCAL_SIZE="1") is None
    assert started_ranks.translate({"PATH": "/bin"}) is None
    assert started_ranks.translate({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # the batch script


def test_a_task_that_sees_all_gpus_takes_its_own():
    ranks = [translated(environment, CUDA_VISIBLE_DEVICES="0,1") for environment in environments("srun-gpu-per-task")]
    assert [rank.variables["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]


def test_what_cannot_be_is_refused():
    with pytest.raises(TopologyError, match=r"OMPI_COMM_WORLD_SIZE is 'x'.*whole number"):
        translated(without_head(next(environments("slurm-mpirun"))), OMPI_COMM_WORLD_SIZE="x")
    with pytest.raises(TopologyError, match=r"SLURM_NODEID=2.*this node has no number"):
        translated(without_head(next(environments("srun-gpu-per-task"))), SLURM_NODEID="2")


def test_ranks_that_do_not_know_their_place_on_the_node_are_refused():
    with pytest.raises(TopologyError, match=r"PMI_SIZE=4.*has no MPI_LOCALRANKID, MPI_LOCALNRANKS.*unsynchronized copies"):
        started_ranks.translate({"PMI_RANK": "1", "PMI_SIZE": "4"})


# The script ------------------------------------------------------------------------------------------------------------------


BY_HAND = {"NP": "4", "MASTER_ADDR": "node1", "MPIRUN": "mpirun --host node1:2,node2:2"}


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("Open MPI", BY_HAND, "<--host><node1:2,node2:2><-np><4><-x><MASTER_ADDR>"),
        ("Open MPI", {"PBS_NODEFILE": "nodes"}, "<--bind-to><none><--machinefile><nodes><-np><3>"),
        ("Open MPI", BY_HAND | {"PBS_NODEFILE": "nodes"}, "<--host><node1:2,node2:2><-np><4><-x><MASTER_ADDR>"),
        ("HYDRA", {"PBS_NODEFILE": "nodes"}, "<--bind-to><none><-np><2>"),  # which knows PBS
    ],
)
def test_the_script_starts_a_process_for_each_rank(tmp_path, kind, given, words):
    version = f'[ "$1" = --version ] && echo "mpirun ({kind}) 4.1.4" && exit\n'
    for name in ("mpirun", "python"):
        fake = tmp_path / name
        fake.write_text(f'#!/bin/sh\n{version}[ "$1" = -c ] && echo /run_module.py && exit\nprintf "<%s>" "$@"; exit 42\n')
        fake.chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn2\nn2\n")
    command = [str(REPOSITORY / "launch" / "mpirun.sh"), "--run-dir", "a b", "data.path=$HOME/*"]
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", **given}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = f"{words}<{tmp_path}/python></run_module.py><app.train>"
    assert result.stdout == f"{expected}<--resume><auto><--run-dir><a b><data.path=$HOME/*>"
    assert result.returncode == 42


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI: run `make lab-packages`")
def test_in_a_pbs_job_open_mpi_reaches_the_hosts_by_pbs_tmrsh(tmp_path):
    """A real mpirun without PBS's library, and a stand-in of pbs_tmrsh, which starts no shell and hands nothing on."""
    files = {
        "pbs_tmrsh": 'shift; exec env -i HOME="$HOME" PATH=/bin:/usr/bin "$@"',
        "python": '[ "$1" = -c ] && echo x && exit\necho "$OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_LOCAL_RANK $4"',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**as_root, "HOME": str(tmp_path), "PATH": f"{tmp_path}:/bin:/usr/bin", "PBS_NODEFILE": f"{tmp_path}/nodes"}
    command = [str(REPOSITORY / "launch" / "mpirun.sh")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert sorted(result.stdout.splitlines()) == ["0/0 auto", "1/1 auto", "2/0 auto", "3/1 auto"], result.stderr


if __name__ == "__main__":
    print("\n".join(golden_lines()))
