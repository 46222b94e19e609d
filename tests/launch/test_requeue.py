"""A job's times and its way back into the queue, on scripted answers of Slurm and PBS; crashes and restarts on this machine.

The real Slurm is in test_requeue_lab.py. What happens on PBS is tried on captured answers of a real OpenPBS 23.06.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import REPOSITORY, captured, clean_environment

from app.errors import STOPPED, TrainingError
from launch.schedulers import pbs, slurm
from launch.schedulers.hosts import NotDoneError, Times
from launch.start.launch import OutcomeFile

IN_PLACE = REPOSITORY / "tests" / "scripts" / "in_place"


# Slurm ---------------------------------------------------------------------------------------------------------------------

BATCH = captured("slurm/2node-exclusive-batch")
RUNNING = "JobId=25 JobState=RUNNING Reason=None Restarts=0 TimeLimit=00:05:00 SubmitTime=90 StartTime=100 EndTime=400"


class Scontrol:
    """Answers `show job` and takes note of the rest."""

    def __init__(self, shown: str, refuses: str = "") -> None:
        self.shown, self.refuses, self.requests = shown, refuses, []

    def __call__(self, arguments):
        if arguments[0] == self.refuses:
            raise NotDoneError(f"`scontrol {arguments[0]}` fails: Requested operation is presently disabled")
        self.requests += [] if "show" in arguments else [" ".join(arguments)]
        return self.shown


COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")
LATER = "update JobId=25 StartTime=now+15"


@pytest.mark.parametrize(
    ("shown", "asked"),
    [
        (COMPLETING.replace("Restarts=0", "Restarts=1"), [LATER]),
        (COMPLETING.replace("EndTime=400", "EndTime=421"), ["requeue 25", LATER]),
        (COMPLETING.replace("EndTime=400", "EndTime=300"), []),
    ],
    ids=["requeued", "at its limit", "cancelled"],
)
def test_a_slurm_job_goes_into_the_queue_once_unless_it_was_cancelled(shown, asked):
    scontrol = Scontrol(shown)
    job = slurm.find_job(BATCH, scontrol=scontrol)
    if asked:
        assert "job 25" in job.requeue([signal.SIGTERM])
    else:
        with pytest.raises(NotDoneError, match="for example after scancel"):
            job.requeue([signal.SIGTERM])
    assert scontrol.requests == asked


def test_what_slurm_refuses_is_reported():
    with pytest.raises(NotDoneError, match="presently disabled"):
        slurm.find_job(BATCH, scontrol=Scontrol(RUNNING, refuses="requeue")).requeue([])
    scontrol = Scontrol(RUNNING, refuses="update")
    assert "Slurm requeues job 25" in slurm.find_job(BATCH, scontrol=scontrol).requeue([])
    assert scontrol.requests == ["requeue 25"]


def test_the_times_of_a_slurm_job():
    times = slurm.find_job(BATCH, scontrol=Scontrol(RUNNING)).times()
    assert (times.submitted_s, times.started_s, times.ends_s) == (90, 100, 400)
    assert slurm.find_job(BATCH, scontrol=Scontrol(RUNNING.replace("400", "Unknown"))).times().ends_s is None
    assert "no such job" in slurm.find_job(BATCH, scontrol=_silent).times().origin
    # A task asks nobody: thousands would.
    task = captured("slurm/2node-1task-gres2-step-task1") | {"SLURM_JOB_END_TIME": "500"}
    assert slurm.find_job(task, scontrol=Scontrol("must not be asked")).times().ends_s == 500


def _silent(_):
    raise NotDoneError("no such job")


def test_the_ranks_are_told_the_times_and_nothing_of_another_job():
    inherited = {"SAMERUN_END_TIME": "9", "SAMERUN_START_TIME": "8", "A": "b"}
    environment = Times(submitted_s=1.4, ends_s=3.0, origin="").added_to(inherited)
    assert environment == {"A": "b", "SAMERUN_SUBMIT_TIME": "1", "SAMERUN_END_TIME": "3"}


# PBS -----------------------------------------------------------------------------------------------------------------------

PBS = captured("pbs/select-2x2-batch")
JOB = {
    "Job_Name": "samerun", "queue": "workq", "Account_Name": "A", "Join_Path": "oe", "run_count": 1,
    "Output_Path": "head:/home/user/project/samerun.o3", "ctime": "Sat Nov 21 10:03:40 2026",
    "stime": "Sat Nov 21 10:03:45 2026",
    "Resource_List": {"ncpus": 4, "nodect": 2, "mpiprocs": 4, "filesystems": "home", "place": "scatter", "walltime": "00:10:00",
                      "select": "2:ncpus=2:mpiprocs=2"},
    "Variable_List": {"PBS_O_HOME": "/home/user", "PATH": "/bin", "SAMERUN_ARGS": "--preset 'a b', c", "HF_TOKEN": "secret"},
    "Submit_arguments": "-v SAMERUN_ARGS=--preset 'a b', c,HF_TOKEN -l select=2:ncpus=2:mpiprocs=2 launch/multinode.pbs",
}  # fmt: skip


def pbs_found(qsub=None, job=JOB, **said):
    said = PBS | {"PBS_O_WORKDIR": str(REPOSITORY)} | said
    return pbs.find_job(said, describe_job=lambda job_id: json.dumps({"Jobs": {job_id: job}}), qsub=qsub)


def test_a_pbs_job_submits_its_successor():
    calls = []

    def qsub(command, **variables):
        calls.append((command, variables))
        return "8.head"

    assert pbs_found(qsub).requeue([]) == "PBS job 8.head continues it"
    second = pbs_found(qsub, PBS_JOBID="8.head", SAMERUN_REQUEUES="1", SAMERUN_FIRST_JOB="3")
    assert (second.name, second.requeues) == ("3", 1)
    second.requeue([])
    command = ["qsub", "-N", "samerun", "-q", "workq", "-A", "A", "-l", "filesystems=home", "-l", "place=scatter",
               "-l", "walltime=00:10:00", "-l", "select=2:ncpus=2:mpiprocs=2", "-j", "oe",
               "-v", "SAMERUN_REQUEUES,SAMERUN_FIRST_JOB,SAMERUN_ARGS,HF_TOKEN",
               f"{REPOSITORY}/launch/multinode.pbs"]  # fmt: skip
    assert calls == [(command, {"SAMERUN_REQUEUES": number, "SAMERUN_FIRST_JOB": "3"}) for number in ("1", "2")]


def test_a_log_with_a_name_of_its_own_is_not_replaced():
    log = "/home/user/runs/submitted/a.out"
    command = pbs.successor(JOB | {"Output_Path": f"head:{log}.1"}, submitted_in=str(REPOSITORY), requeues=2)
    assert command[command.index("-o") + 1] == f"{log}.2"


def test_a_deleted_pbs_job_has_no_successor_and_one_at_its_limit_has():
    with pytest.raises(NotDoneError, match="for example after qdel"):
        pbs_found(job=JOB | {"stime": time.strftime("%a %b %d %H:%M:%S %Y")}).requeue([signal.SIGTERM])
    assert pbs_found(lambda *_, **__: "8.head").requeue([signal.SIGTERM])
    assert pbs_found(lambda *_, **__: "8.head", PBS_ARRAY_INDEX="1", PBS_ARRAY_ID="2[].head").requeue([])


@pytest.mark.parametrize(
    ("said", "job", "words"),
    [
        ({"PBS_JOBID": "14[1].head"}, JOB, "is an array job"),
        ({}, JOB | {"Submit_arguments": "-l select=1"}, "does not end with a script"),
        ({}, {}, "does not describe the job"),
    ],
)
def test_a_pbs_job_that_cannot_have_a_successor_says_why(said, job, words):
    with pytest.raises(NotDoneError, match=words):
        pbs_found(job=job, **said).requeue([])


def test_the_times_of_a_pbs_job_are_those_of_its_server():
    times = pbs_found().times()
    assert (times.ends_s - times.started_s, times.started_s - times.submitted_s) == (600, 5)
    assert time.localtime(times.started_s)[:6] == (2026, 11, 21, 10, 3, 45)
    assert pbs.find_job(PBS, describe_job=_silent).times().origin == "no such job"
    assert "did not describe" in pbs.find_job(PBS, describe_job=lambda _: "nothing").times().origin


def test_only_a_batch_script_of_pbs_has_a_successor():
    assert pbs_found(PBS_ENVIRONMENT="PBS_INTERACTIVE").requeue is None
    assert pbs_found(PBS_JOBID="14[1].head").name == "14_1"


# How a run ended -----------------------------------------------------------------------------------------------------------


def test_an_outcome_of_an_earlier_start_is_none(tmp_path):
    said = {"outcome": "stopped", "reason": "SIGTERM", "go_on": True, "step": 3, "total_steps": 9, "time": 1.5}
    assert OutcomeFile(tmp_path / "not there").read(1, is_required=True) is None
    (tmp_path / "outcome.json").write_text(json.dumps(said))
    folder = OutcomeFile(tmp_path)
    with pytest.raises(TrainingError, match=r"something called os\._exit"):
        folder.read(0, is_required=True)
    (tmp_path / "outcome.json").write_text(json.dumps(said | {"time": 2.5}))
    outcome = folder.read(0, is_required=True)
    assert str(outcome) == "stopped at step 3 of 9 (SIGTERM)"


# On this machine -----------------------------------------------------------------------------------------------------------


# One process has no `accelerate launch` above it, several have.
ALONE, TOGETHER = ("--preset", "cpu"), ("--preset", "multi_gpu", "--processes", "2")


def launch(run_dir: Path, happens: str, *options: str, preset: tuple[str, ...] = ALONE) -> subprocess.Popen:
    """`samerun launch` with a stand-in for the training."""
    said = clean_environment() | {"PYTHONPATH": f"{IN_PLACE}:{REPOSITORY}", "IN_PLACE": happens}
    command = [sys.executable, "-m", "launch.cli", "launch", *preset, "--run-dir", str(run_dir), *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=said, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err.splitlines()


@pytest.mark.parametrize("preset", [ALONE, TOGETHER], ids=["one", "several"])
def test_a_crash_is_followed_by_a_restart_and_the_second_is_the_end(tmp_path, preset):
    (old := tmp_path / "old").mkdir()
    code, out, err = ended(launch(tmp_path / "a", "killed 30", "--max-restarts", "2", "--resume", str(old), preset=preset))
    assert (code, [line.partition(",")[0] for line in out]) == (0, ["from step 0", "from step 30"])
    assert [line.rpartition(", ")[2] for line in out] == [f"--resume {old}", "--resume auto"]
    assert "samerun: the run crashed, and resumes from its newest checkpoint: restart 1 of 2" in err
    code, out, err = ended(launch(tmp_path / "b", "always 1", "--max-restarts", "1", preset=preset))
    assert (code, len(out)) == (137, 2)
    assert err[-1].endswith(" was ended by SIGKILL, possibly out of memory, and the run with it")


@pytest.mark.parametrize(("number", "preset"), [(signal.SIGTERM, ALONE), (signal.SIGTERM, TOGETHER), (signal.SIGINT, TOGETHER)])
def test_a_signal_reaches_the_rank_which_ends_in_its_own_time(tmp_path, number, preset):
    """The launcher would die of it and leave its process behind."""
    process = launch(tmp_path, "slow 0", preset=preset)
    assert process.stdout.readline().startswith("from step 0")
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == STOPPED
    assert json.loads((tmp_path / "outcome.json").read_text())["go_on"] == (number != signal.SIGINT)
    (last,) = [line for line in err if "the run stopped" in line]
    assert last.endswith(f"To resume it: samerun launch {' '.join(preset)} --run-dir {tmp_path}")


def test_what_is_left_of_a_crash_is_gone_before_the_restart(tmp_path):
    """Its launcher is killed, so its process lives on; the restart would share the run folder with it."""
    process = launch(tmp_path, "orphan 10", "--max-restarts", "1", preset=TOGETHER)
    code, out, _ = ended(process)
    first, second = (int(line.split("process ")[1].split(",")[0]) for line in out)
    assert code == 0
    assert not Path(f"/proc/{first}").exists()
    assert first != second
