"""Jobs and shells of a real Slurm that were started from within others: what their environment holds is not all theirs.

tests/environments/slurm-nested has the environment of each, its cgroup, and the processes above it: id,
parent, terminal, title. The real Slurm is in test_slurm_lab.py and test_requeue_lab.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, captured

from app.environment import started_ranks
from app.environment.slurm_variables import Origin, for_a_new_job, origin_of, without_inherited
from launch.schedulers import detect, slurm

CAPTURED = Path(__file__).parents[1] / "environments"


def seen_by(name: str) -> tuple[list[str], str, bool]:
    """Return the titles of a captured process and those above it, its cgroup, and whether its step's task has a terminal."""
    text = (CAPTURED / "slurm-nested" / f"{name}.txt").read_text()
    lines = [line[2:].split(" ", 1) for line in text.splitlines() if line.startswith("# ")]
    processes = [words.split(" ", 3) for kind, words in lines if kind == "process"]
    task = captured(f"slurm-nested/{name}").get("SLURM_TASK_PID")
    has_terminal = all(terminal != "0" for pid, _, terminal, _ in processes if pid == task)
    return [title for *_, title in processes], "\n".join(words for kind, words in lines if kind == "cgroup"), has_terminal


# Job and step of each process; then, of some, the nodes and whether it is a task; name of the job, its end in Unix seconds, and
# whether it is run again.
CASES = {
    # A batch script is none of the steps that its job was submitted from.
    "step-batch": ("22", "batch", (2, False, "22", 500, True)),
    "array-batch": ("27", "batch", (2, False, "27", 500, True)),
    # A task stays one, also one of a shell, whose terminal it has not.
    "step-batch-task1": ("22", "0", (2, True, "22.0", None, False)),
    "pty-2node-task": ("16", "1", (1, True, "16.1", None, False)),
    # A shell has the job, its name and its end, and is not run again.
    "pty-1node-shell": ("18", "0", (1, True, "18", 500, False)),
    "pty-2node-shell": ("16", "0", (2, False, "16", 500, False)),
    "interactive-shell": ("17", "interactive", (2, False, "17", 500, False)),
    # The shell of salloc is on no node of its job, wherever it was typed.
    "pty-salloc": ("18", "0", (2, False, "26", 500, False)),
    "batch-salloc": ("15", "batch", (1, False, "21", 500, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_inside_another_is_itself(name: str) -> None:
    titles, cgroup, has_terminal = seen_by(name)
    job_id, step, expected = CASES[name]
    origin = Origin(job_id, step, has_terminal)
    assert origin_of(titles, "0::/", has_terminal=has_terminal) == origin
    assert origin_of(titles[:1], cgroup, has_terminal=has_terminal) == origin
    kept = without_inherited(captured(f"slurm-nested/{name}"), origin)
    answer = f"JobId={kept['SLURM_JOB_ID']} Restarts=0 EndTime=500"
    host = kept.get("SLURMD_NODENAME", "node9")
    allocation = slurm.find(kept, hostname=host, has_srun=True, scontrol=lambda arguments: "     Nodes=node1 Mem=1 GRES=\n")
    job = slurm.find_job(kept, scontrol=lambda arguments: answer)
    assert allocation is not None
    assert job is not None
    assert bool(allocation.start) == (not allocation.is_task)
    nodes = allocation.topology.num_nodes
    assert (nodes, allocation.is_task, job.name, job.times().ends_s, job.requeue is not None) == expected
    if not allocation.is_task:
        detect._refuse_other_starters(kept)
        assert started_ranks.translate(kept) is None


def test_both_versions_of_cgroups_are_read() -> None:
    second = "1:name=systemd:/\n0::/system.slice/slurmstepd.scope/job_22/step_batch/user/task_0\n"
    first = "6:freezer:/slurm/uid_0/job_9/step_0/lab/slurm_node1/uid_0/job_22/step_batch"
    assert [origin_of(["bash"], group) for group in (second, first, "0::/user.slice")] == [Origin("22", "batch")] * 2 + [None]


def test_a_process_above_this_one_is_read_from_the_real_kernel() -> None:
    """Under a process with slurmstepd's title, and none of Slurm's cgroups: as with ProctrackType=proctrack/linuxproc."""
    code = (
        "import os; from app.environment.slurm_variables import own_environment; print(*os.environ.keys() - own_environment())"
    )
    script = f"exec -a 'slurmstepd: [7.batch]' bash -c '{sys.executable} -c \"{code}\"; true'"
    variables = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "PATH": "/bin:/usr/bin"}
    finished = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True)
    assert finished.stdout == "SLURM_STEP_ID\n"


@pytest.mark.parametrize("name", ["2node-1task-gres2-step-task1", "2node-2task-gpuspertask1-batch", "het-step-task1"])
def test_what_is_not_known_to_be_inherited_stays(name: str) -> None:
    variables = captured(f"slurm/{name}")
    step = variables.get("SLURM_STEP_ID", "batch")
    for origin in (None, Origin(variables["SLURM_JOB_ID"], step), Origin("1", "extern")):
        assert without_inherited(variables, origin) == variables


def test_a_job_submitted_in_an_array_is_no_task_of_it() -> None:
    """Nor is it run again instead of that task, nor as often as that one was."""
    requests = []
    described = "JobId=20 ArrayJobId=20 ArrayTaskId=4 Restarts=3\nJobId=27 JobState=RUNNING Restarts=0\n"

    def scontrol(arguments):
        requests.append(" ".join(arguments))
        return described

    job = slurm.find_job(captured("slurm-nested/array-batch") | {"SLURM_RESTART_COUNT": "3"}, scontrol=scontrol)
    assert (job.name, job.requeues) == ("27", 0)
    job.requeue([])
    assert requests == ["--oneliner show job 27"] * 2 + ["requeue 27", "update JobId=27 StartTime=now+15"]


def test_what_is_submitted_in_a_job_is_handed_nothing_of_it() -> None:
    kept = for_a_new_job(captured("slurm-nested/step-batch-task1") | {"PATH": "/bin", "SLURM_TMPDIR": "/scratch/22"})
    assert sorted(name for name in kept if name.startswith("SLURM")) == ["SLURM_CONF"]
    assert kept["PATH"] == "/bin"
    outside = {"SLURM_TIME_FORMAT": "%s", "SLURM_NTASKS": "4"}
    assert for_a_new_job(outside) == outside


def test_gpus_tasks_and_pmi_that_a_batch_script_inherited_from_another_job() -> None:
    inherited = {"SLURM_GPUS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": "4", "PMI_JOBID": "5.0", "PMI_RANK": "1"}
    own = {"SLURM_JOB_ID": "6", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert without_inherited({**own, **inherited}, Origin("6", "batch")) == own
    given = {**own, "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "1"}
    assert without_inherited(given, Origin("6", "batch")) == given
