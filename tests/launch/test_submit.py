"""`samerun submit`: what is checked before the queue, and the scripts. Real jobs: test_submit_lab.py.

The golden file holds the scripts; after an intended change:
    PYTHONPATH=. python tests/launch/test_submit.py > tests/golden/submit.txt
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from processes import REPOSITORY, clean_environment, placed

from app.errors import SubmitError, TopologyError
from app.recipe import kinds
from launch import cases
from launch.submit import submit

GOLDEN = Path(__file__).parents[1] / "golden" / "submit.txt"
JOB = ("--nodes", "2", "--time", "01:30:00")
SLURM = ("--scheduler", "slurm", "--dry-run", *JOB)
PBS = ("--scheduler", "pbs", "--dry-run", *JOB)
SITE = ("--account", "def-me", "--partition", "gpu")
RUN = ("--preset", "deepspeed_zero3", "--recipe", "digits")
SWEEP = "optim.lr=0.1,0.2;seed=0,1;model.channels=[8,16],[32,64]"
CASES = {
    "slurm": (*SLURM, *SITE, *RUN, "--gpus-per-node", "a100:4", "optim.lr=0.1", "augment.crop_padding=2"),
    "slurm, shared nodes": (*SLURM, *RUN, "--processes-per-node", "2", "--cpus-per-node", "8", "--sbatch-option=--mem=32G",
                            "--sbatch-option=--oversubscribe", "--sbatch-option=--exclude=node[7-9]"),
    "slurm, as little as can be said": SLURM,
    "slurm, a sweep": (*SLURM, *RUN, "--gpus-per-node", "4", "--job-name", "rates", "--run-dir", "my runs", "--array", SWEEP,
                       "train.epochs=2", "--", "--trackers", "none"),
    "pbs": (*PBS, *SITE, *RUN, "--gpus-per-node", "4", "--cpus-per-node", "32", "--qsub-option=-l filesystems=home:eagle"),
    "slurm, other limits": (*SLURM, "--max-requeues", "0", "--max-restarts", "3", "--sbatch-option=--no-requeue"),
    "slurm, in a container": (*SLURM, "--container-image", "docker://it", "--container-runtime", "singularity",
                              "--container-mounts", "/:/host:ro", "--container-option=--writable-tmpfs", "seed=1"),
    "slurm, spare nodes": (*SLURM, "--spares", "1", "--min-nodes", "2"),
    "pbs, a sweep": (*PBS, *RUN, "--gpus-per-node", "4", "--array", "seed=0,1,2"),
}  # fmt: skip


def submitted(folder, *arguments, **env):
    """`samerun submit` typed in a folder: what it prints, and its messages."""
    out, messages = io.StringIO(), []
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        submit(list(arguments), clean_environment() | env, say=messages.append)
    return out.getvalue(), "\n".join(messages)


def scripts(folder):
    """The script of each case, submitted with a password in the environment."""
    return {name: submitted(folder, *arguments, HF_TOKEN="hunter2")[0] for name, arguments in CASES.items()}


def golden_lines(scripts, folder):
    for name, text in scripts.items():
        yield f"==> {name}"
        same_everywhere = placed(text.replace(shlex.quote(str(folder)), "FOLDER"))
        yield from re.sub(r"\d{8}-\d{6}", "TIME", same_everywhere).splitlines()


def problems(folder, *arguments, **env):
    """What is wrong, line by line; nothing may have been written."""
    with pytest.raises(SubmitError) as caught:
        submitted(folder, *arguments, **env)
    assert not (folder / "runs").exists()
    return str(caught.value).splitlines()


# Scripts -------------------------------------------------------------------------------------------------------------------


def test_the_scripts_are_those_of_the_golden_file_and_right_for_a_shell(tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    found = scripts(folder)
    assert list(golden_lines(found, folder)) == GOLDEN.read_text().splitlines()
    assert list(folder.iterdir()) == [], "a dry run writes nothing"
    assert "hunter2" not in "".join(found.values())
    for number, text in enumerate(found.values()):
        (tmp_path / f"{number}.sh").write_text(text)
    checkers = [["bash", "-n"], *([["shellcheck", "--norc"]] if shutil.which("shellcheck") else [])]
    for checker, path in itertools.product(checkers, sorted(tmp_path.glob("*.sh"))):
        finished = subprocess.run([*checker, path], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr


def test_a_task_trains_its_combination_in_a_folder_of_its_own(tmp_path):
    """The script is run by a shell; only what the job becomes in the end is printed (--dry-run) instead."""
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    (folder / "a b*").touch()
    arguments = ("--nodes", "1", "--time", "1:00:00", "--scheduler", "pbs", "--dry-run", "--processes-per-node", "2")
    text, _ = submitted(folder, *arguments, "--array", "optim.lr=0.1,0.2;seed=7,8", "data.path=a b*", "--", "--dry-run")
    (tmp_path / "nodes").write_text("node1\n")
    job = {"PBS_ARRAY_INDEX": "2", "PBS_JOBID": "14[2].head", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_PATH": "/usr/bin"}
    (tmp_path / "job").write_text(text)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **job}
    finished = subprocess.run(["sh", tmp_path / "job"], cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    command = shlex.split(finished.stdout)
    assert command[-3:] == ["data.path=a b*", "optim.lr=0.2", "seed=7"]
    run_dir = command[command.index("--run-dir") + 1]
    assert re.fullmatch(r"runs/digits-\d+-\d+/lr=0.2-seed=7", run_dir)
    assert command[command.index("--num_processes") + 1] == "2"
    assert "task 2 of the array: optim.lr=0.2 seed=7" in finished.stderr


# What is wrong before the queue --------------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_reported_together(tmp_path):
    (tmp_path / "file").touch()
    arguments = ("--preset", "multi_nod", "--recipe", "digit", "--run-dir", "file/run", "--sbatch-option=nodes",
                 "--array", "seed=1;seed=2")  # fmt: skip
    expected = ["'nodes' is no option", "--array has 'seed=2'", "preset multi_nod", "recipe digit", "file/run cannot be made"]
    found = problems(tmp_path, *SLURM, *arguments)
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


def test_what_only_the_image_needs_is_not_looked_for_here(tmp_path):
    trackers = ("--", "--trackers", "dvclive")
    assert "dvclive, which is not installed here" in problems(tmp_path, *SLURM, *trackers)[0]
    assert "--trackers dvclive" in submitted(tmp_path, *SLURM, "--container-image", "docker://it", *trackers)[0]


def test_a_container_that_cannot_be_is_reported(tmp_path):
    image = ("--container-image", "it.sif", "--container-mounts", "/no/such")
    expected = [f"{it}: no such file or folder. Correct it, or give --data-on-nodes" for it in ("is it.sif", "has /no/such")]
    assert all(text in line for text, line in zip(expected, problems(tmp_path, *SLURM, *image), strict=True))
    (pbs,) = problems(tmp_path, *PBS, *image, "--data-on-nodes")
    assert "only a batch script or salloc of Slurm" in pbs


def test_a_job_of_pbs_has_no_spare_nodes(tmp_path):
    assert problems(tmp_path, *PBS, "--spares", "1")[0].startswith("--spares is 1, but only a Slurm job can continue")


def test_an_unfinished_run_is_resumed_and_a_finished_one_refused(tmp_path):
    used = tmp_path / "sweep" / "seed=8"
    used.mkdir(parents=True)
    (used / "recipe.yaml").touch()
    arguments = (*SLURM, "--run-dir", "sweep", "--array", "seed=7,8")
    assert submitted(tmp_path, *arguments)
    (used / "result.json").touch()
    assert problems(tmp_path, *arguments)[0].startswith("sweep/seed=8 holds a finished run")


@pytest.mark.parametrize("words", ["--data-on-nodes data.path=no/such", "data.path=no data.download=true data.source=mnist"])
def test_data_that_is_not_here_may_be_right(tmp_path, words):
    assert submitted(tmp_path, *SLURM, *words.split())


# Sweeps --------------------------------------------------------------------------------------------------------------------


TEXTS = st.text("abAB0./ -+_:", min_size=1).filter(str.strip).map(str.strip)
VALUES = st.lists(TEXTS, min_size=2, max_size=4, unique_by=lambda text: kinds.plain(yaml.ScalarNode("", text)))


@given(values=st.dictionaries(st.from_regex(r"[a-z]{1,4}(\.[a-z]{1,4})?", fullmatch=True), VALUES, min_size=1, max_size=3))
def test_a_sweep_is_every_combination_once_each_with_a_name_of_its_own(values):
    text = ";".join(f"{key}={','.join(choices)}" for key, choices in values.items())
    combinations = cases.combinations(text)
    chosen = itertools.product(*([f"{key}={choice}" for choice in choices] for key, choices in values.items()))
    assert [combination.overrides for combination in combinations] == list(chosen)
    assert all(re.fullmatch(r"[A-Za-z0-9.+=_-]{1,200}", combination.name) for combination in combinations)
    assert len({combination.name.casefold() for combination in combinations}) == len(combinations)
    assert cases.array_task(text, {"PBS_ARRAY_INDEX": "1"}) == (1, combinations[1])


@pytest.mark.parametrize("environment", [{}, {"SLURM_ARRAY_TASK_ID": "2"}, {"PBS_ARRAY_INDEX": "x"}])
def test_a_task_outside_of_its_array_is_refused(environment):
    with pytest.raises(TopologyError, match=r"is '[2x]?', .* the indices 0 to 1"):
        cases.array_task("seed=0,1", environment)


# Handing over --------------------------------------------------------------------------------------------------------------


def with_programs(folder, **programs):
    """A PATH on which there are only these shell scripts."""
    folder.mkdir()
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("programs", "asked", "command", "job"),
    [
        ({"sbatch": "echo '22;main'", "qsub": "echo 14.head"}, [], "sbatch --parsable", "22"),
        ({"qsub": "echo '14[].head'"}, [], "qsub", "14[].head"),
        ({"sbatch": "echo 22", "qsub": "echo '14[].head'"}, ["--scheduler", "pbs"], "qsub", "14[].head"),
    ],
)
def test_the_script_is_handed_to_the_scheduler_that_is_there(tmp_path, programs, asked, command, job):
    record = tmp_path / "record"
    programs = {name: f'echo "{name}" "$@" >{record}; {lines}' for name, lines in programs.items()}
    path = with_programs(tmp_path / "bin", **programs)
    out, messages = submitted(tmp_path, *JOB, *asked, PATH=path)
    assert out == f"{job}\n"
    (kept,) = (tmp_path / "runs" / "submitted").glob("*.sh")
    assert record.read_text() == f"{command} runs/submitted/{kept.name}\n"
    assert f"run folder runs/{kept.stem}, log runs/submitted/{kept.stem}.out" in messages
    assert f"job {job}, submitted by runs/submitted/{kept.name}" in messages
    prefix = "#SBATCH --output=" if command.startswith("sbatch") else "#PBS -o "
    assert f"{prefix}runs/submitted/{kept.stem}.out\n" in kept.read_text()


def test_what_the_scheduler_refuses_is_said_in_its_words(tmp_path):
    path = with_programs(tmp_path / "bin", sbatch="echo 'sbatch: error: invalid account' >&2; exit 1")
    with pytest.raises(SubmitError, match=r"exit code 1 .*invalid account.*script is kept: runs/submitted/digits-\S+\.sh$"):
        submitted(tmp_path, *JOB, PATH=path)


def test_without_a_scheduler_that_is_reported(tmp_path):
    empty = with_programs(tmp_path / "bin")
    assert "neither sbatch nor qsub" in problems(tmp_path, *JOB, "--dry-run", PATH=empty)[0]
    assert "qsub is not on the PATH" in problems(tmp_path, *JOB, "--scheduler", "pbs", PATH=empty)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        folder = os.path.realpath(here)
        print("\n".join(golden_lines(scripts(folder), folder)))
