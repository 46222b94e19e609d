"""Jobs and sweeps that cannot be submitted: all that is wrong is reported before the queue."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from refusals import Refused, put

JOB = "--nodes 1 --time 1:00:00"
PROBLEMS: dict[str, str] = {
    "--gpus-per-node 3": "train.global_batch_size is 64, which 3 processes cannot divide",
    "--num_processes 3 --gpus-per-node 2": "--num_processes is 3, the total number of processes, on 1 nodes, and another",
    "--preset cpu --processes-per-node 2": "preset cpu starts 1 process, and this run has 2",
    "--recipe digts": "there is no recipe or file of that name; did you mean digits?",
    "optim.lrr=1": "optim.lrr (command line): there is no such key; did you mean optim.lr?",
    "seed=1 seed=2": "seed is given twice (command line: 1 and 2): keep one of them",
    "data.path=nowhere": "you may not read it. Correct it, or give --data-on-nodes if only the nodes of the job have it",
    "--run-dir file/run": "file/run cannot be made, because",
    "--array x": "--array has 'x': expected key=value,value",
    "--array seed=1": "--array is 'seed=1', which is a single run",
    "--array seed=1,2;seed=3,4": "--array has 'seed=3,4': expected key=value,value, each key and value once",
    "--array optim.lr=0.1,fast": "optim.lr is fast (command line): expected a number (task 1 of --array)",
    "--array train.global_batch_size=64,63 --processes-per-node 2": "is 63, which 2 processes cannot divide",
    "--array seed=1,2 seed=3": "seed is given by --array and by seed=...: remove one of them",
    "--sbatch-option='--comment=a\nrm -r x'": "it must be one line that begins with -",
    "-- --lr 0.1": "--lr: unknown option; recipe values are given as key=value: optim.lr=0.1",
    "-- --recipe mnist": "--recipe is given twice (digits and mnist): keep one of them",
}


@pytest.mark.parametrize(("words", "sentence"), PROBLEMS.items(), ids=PROBLEMS)
def test_what_would_fail_in_the_job(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    refused(["samerun", "submit", "--dry-run", "--scheduler", "slurm", *shlex.split(f"{JOB} {words}")], sentence, 10)
    assert not (tmp_path / "runs").exists()


OPTIONS: dict[str, str] = {
    "--time 1:00:00": "the following arguments are required: --nodes",
    "--nodes 1 --time 1:60:00": "--time: '1:60:00': expected hours:minutes:seconds",
    "--nodes 1 --time 0:00:00": "--time: '0:00:00': expected hours:minutes:seconds, more than 0",
    f"{JOB} --gpus-per-node a100:2,h100:0": "--gpus-per-node: 'a100:2,h100:0': expected a whole number, 1 or more",
    f"{JOB} --partition 'gpu\n#SBATCH --nodes=9'": r"--partition: 'gpu\n#SBATCH --nodes=9': expected a word of letters",
    f"{JOB} --gpus-per-node 2 --processes-per-node 2": "--processes-per-node: not allowed with argument --gpus-per-node",
}


@pytest.mark.parametrize(("words", "sentence"), OPTIONS.items(), ids=OPTIONS)
def test_an_option_of_the_wrong_form(words: str, sentence: str, refused: Refused) -> None:
    refused(["samerun", "submit", "--dry-run", *shlex.split(words)], sentence, 2)
