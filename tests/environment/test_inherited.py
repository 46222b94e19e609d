"""Jobs and shells of a real Slurm that were started from within others: what their environment holds is not all theirs.

tests/environments/slurm-nested has the environment of each, its cgroup, and the processes above it: id,
parent, terminal, title. The real Slurm is in test_slurm_lab.py and test_requeue_lab.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.environment import slurm_variables, started_ranks
from app.environment.slurm_variables import Origin, find_origin, for_a_new_job, without_inherited
from launch.schedulers import detect, slurm

CAPTURED = Path(__file__).parents[1] / "environments"


def environment(path: str) -> dict[str, str]:
    lines = (CAPTURED / f"{path}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def proc(name: str, folder: Path, *, hides: str = "") -> Path:
    """The kernel's folder as a captured process saw it, but for its `cgroup` or its `processes`."""
    text = (CAPTURED / "slurm-nested" / f"{name}.txt").read_text()
    lines = [line[2:].split(" ", 1) for line in text.splitlines() if line.startswith("# ")]
    processes = [words.split(" ", 3) for kind, words in lines if kind == "process"]
    (folder / "self").symlink_to(processes[0][0])
    for pid, parent, terminal, title in processes if hides != "processes" else processes[:1]:
        (folder / pid).mkdir()
        (folder / pid / "stat").write_text(f"{pid} (a name) with ) S {parent} 1 1 {terminal} -1 0")
        (folder / pid / "cmdline").write_bytes(title.encode() + b"   \0")
    groups = [words for kind, words in lines if kind == "cgroup"] if hides != "cgroup" else ["0::/"]
    (folder / "self" / "cgroup").write_text("".join(f"{group}\n" for group in groups))
    return folder


ORIGINS = {
    "step-batch": ("22", "batch"),
    "step-batch-task0": ("22", "0"),
    "step-batch-task1": ("22", "0"),
    "pty-1node-shell": ("18", "0"),
    "pty-1node-task": ("18", "1"),
    "pty-2node-shell": ("16", "0"),
    "pty-2node-task": ("16", "1"),
    "pty-batch": ("25", "batch"),
    "pty-salloc": ("18", "0"),
    "interactive-shell": ("17", "interactive"),
    "interactive-task": ("17", "0"),
    "interactive-batch": ("24", "batch"),
    "batch-salloc": ("15", "batch"),
    "pmi2-batch": ("23", "batch"),
    "array-batch": ("27", "batch"),
}


def test_every_captured_process_is_in_the_table() -> None:
    assert set(ORIGINS) == {path.stem for path in (CAPTURED / "slurm-nested").glob("*.txt")}


@pytest.mark.parametrize("hides", ["", "cgroup", "processes"])
@pytest.mark.parametrize("name", ORIGINS)
def test_cgroup_and_slurmstepd_each_tell_where_slurm_started_a_process(name: str, hides: str, tmp_path: Path) -> None:
    origin = find_origin(proc(name, tmp_path, hides=hides))
    assert origin is not None
    assert (origin.job, origin.step) == ORIGINS[name]


@pytest.mark.parametrize(
    "group",
    [
        "0::/system.slice/slurmstepd.scope/job_22/step_batch/user/task_0",
        "6:freezer:/slurm/uid_0/job_22/step_batch",
        "6:freezer:/slurm/uid_0/job_9/step_0/lab/slurm_node1/uid_0/job_22/step_batch",
    ],
)
def test_both_versions_of_cgroups_are_read(group: str, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"1:name=systemd:/\n{group}\n")
    assert find_origin(tmp_path) == Origin("22", "batch", {})


def test_a_process_above_this_one_is_read_from_the_real_kernel() -> None:
    """Under a process with slurmstepd's title, and none of Slurm's cgroups: as with ProctrackType=proctrack/linuxproc."""
    code = "from app.environment.slurm_variables import find_origin as f; o = f(); print(o.job, o.step, *o.terminals.values())"
    script = f"exec -a 'slurmstepd: [7.batch]' bash -c '{sys.executable} -c \"{code}\"; true'"
    finished = subprocess.run(
        ["bash", "-c", script], cwd=Path(slurm_variables.__file__).parents[2], start_new_session=True, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert finished.stdout == "7 batch False False\n"


def job_of(name: str, folder: Path, **facts: str):
    """The allocation and the job that `samerun launch` sees, and the environment that it hands on."""
    kept = without_inherited(environment(f"slurm-nested/{name}"), find_origin(proc(name, folder)))
    described = {"JobId": kept["SLURM_JOB_ID"], "Restarts": "0", "EndTime": "500", **facts}
    answer = " ".join(f"{key}={value}" for key, value in described.items())
    host = kept.get("SLURMD_NODENAME", "node9")
    allocation = slurm.find(kept, hostname=host, has_srun=True, scontrol=lambda arguments: "     Nodes=node1 Mem=1 GRES=\n")
    return allocation, slurm.find_job(kept, scontrol=lambda arguments: answer), kept


@pytest.mark.parametrize(
    ("name", "num_nodes", "is_task", "expected"),
    [
        # A batch script is none of the steps that its job was submitted from.
        ("step-batch", 2, False, ("22", 500, True)),
        ("pty-batch", 2, False, ("25", 500, True)),
        ("interactive-batch", 2, False, ("24", 500, True)),
        ("pmi2-batch", 1, False, ("23", 500, True)),
        ("array-batch", 2, False, ("27", 500, True)),
        # A task stays one, also one of a shell, whose terminal it has not.
        ("step-batch-task1", 2, True, ("22.0", None, False)),
        ("pty-1node-task", 1, True, ("18.1", None, False)),
        ("pty-2node-task", 1, True, ("16.1", None, False)),
        ("interactive-task", 1, True, ("17.0", None, False)),
        # A shell has the job, its name and its end, and is not run again.
        ("pty-1node-shell", 1, True, ("18", 500, False)),
        ("pty-2node-shell", 2, False, ("16", 500, False)),
        ("interactive-shell", 2, False, ("17", 500, False)),
        # The shell of salloc is on no node of its job, wherever it was typed.
        ("pty-salloc", 2, False, ("26", 500, False)),
        ("batch-salloc", 1, False, ("21", 500, False)),
    ],
)
def test_a_job_inside_another_is_itself(name, num_nodes, is_task, expected, tmp_path: Path) -> None:
    """`expected`: its name, its end in Unix seconds, and whether it is run again."""
    allocation, found, kept = job_of(name, tmp_path)
    assert (allocation.topology.num_nodes, allocation.is_task, bool(allocation.start)) == (num_nodes, is_task, not is_task)
    assert (found.name, found.times().ends_s, found.requeue is not None) == expected
    assert allocation.topology.processes_per_node == 1
    if not is_task:
        detect._refuse_mpi(kept)
        assert started_ranks.translate(kept) is None


@pytest.mark.parametrize("name", ["2node-1task-gres2-step-task1", "2node-2task-gpuspertask1-batch", "salloc-2node-gres2-pty"])
def test_what_is_not_known_to_be_inherited_stays(name: str) -> None:
    captured = environment(f"slurm/{name}")
    step = captured.get("SLURM_STEP_ID", "batch")
    terminals = {captured["SLURM_TASK_PID"]: "SLURM_PTY_PORT" in captured}
    for origin in (None, Origin(captured["SLURM_JOB_ID"], step, terminals), Origin("1", "extern", {})):
        assert without_inherited(captured, origin) == captured
    job = Origin("1", "batch", {})
    assert without_inherited(environment("slurm/het-step-task1"), job) == environment("slurm/het-step-task1")


def test_gpus_and_tasks_of_the_outer_job_are_not_the_new_ones(tmp_path: Path) -> None:
    """Which Slurm itself would ask for in vain: `Invalid generic resource`."""
    assert environment("slurm-nested/array-batch")["SLURM_GPUS_PER_NODE"] == "2"
    allocation, _, kept = job_of("array-batch", tmp_path)
    assert "SLURM_GPUS_PER_NODE" not in kept
    assert allocation.topology.processes_per_node == 1
    genuine = environment("slurm/2node-2task-gpuspernode2-bind-batch")
    assert without_inherited(genuine, Origin(genuine["SLURM_JOB_ID"], "batch", {})) == genuine


def test_a_job_submitted_in_an_array_is_no_task_of_it(tmp_path: Path) -> None:
    """Nor is it run again instead of that task, nor as often as that one was."""
    assert environment("slurm-nested/array-batch")["SLURM_ARRAY_TASK_ID"] == "4"
    asked = []
    described = "JobId=20 ArrayJobId=20 ArrayTaskId=4 Restarts=3\nJobId=27 JobState=RUNNING Restarts=0\n"

    def scontrol(arguments):
        asked.append(" ".join(arguments))
        return described

    job = slurm.find_job(environment("slurm-nested/array-batch") | {"SLURM_RESTART_COUNT": "3"}, scontrol=scontrol)
    assert (job.name, job.requeues) == ("27", 0)
    job.requeue([])
    assert asked == ["--oneliner show job 27"] * 2 + ["requeue 27", "update JobId=27 StartTime=now+15"]


def test_a_task_of_an_array_in_which_it_was_submitted_is_of_its_own_array() -> None:
    last = environment("slurm/array-task5-batch")
    assert last["SLURM_JOB_ID"] == last["SLURM_ARRAY_JOB_ID"] == "32"
    described = "JobId=33 ArrayJobId=32 ArrayTaskId=3\nJobId=32 ArrayJobId=32 ArrayTaskId=5 Restarts=1\n"
    job = slurm.find_job(last | {"SLURM_RESTART_COUNT": "1"}, scontrol=lambda arguments: described)
    assert (job.name, job.requeues) == ("32_5", 1)


def test_what_is_submitted_in_a_job_is_handed_nothing_of_it() -> None:
    kept = for_a_new_job(environment("slurm-nested/step-batch-task1") | {"PATH": "/bin", "SLURM_TMPDIR": "/scratch/22"})
    assert sorted(name for name in kept if name.startswith("SLURM")) == ["SLURM_CONF"]
    assert kept["PATH"] == "/bin"
    outside = {"SLURM_TIME_FORMAT": "%s", "SLURM_NTASKS": "4"}
    assert for_a_new_job(outside) == outside
