"""Jobs and sweeps that cannot be submitted: all that is wrong is reported before the queue."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from refusals import Refused, put

PROBLEMS: dict[str, str] = {
    "--gpus-per-node 3": "train.global_batch_size is 64, which 3 processes cannot divide",
    "--num_processes 3 --gpus-per-node 2": "--num_processes is 3, the total number of processes, on 1 nodes, and another",
    "--preset nothing": "preset nothing: there is no shipped preset and no file of that name",
    "--preset cpu --processes-per-node 2": "preset cpu starts 1 process, and this run has 2",
    "--recipe digts": "there is no recipe or file of that name; did you mean digits?",
    "optim.lrr=1": "optim.lrr (command line): there is no such key; did you mean optim.lr?",
    "seed=1 seed=2": "seed is given twice (command line: 1 and 2): keep one of them",
    "data.path=nowhere": "you may not read it. Correct it, or give --data-on-nodes if only the nodes of the job have it",
    "--recipe imagefolder": "data.path is not given, and the recipe has no data without it",
    "--run-dir file/run": "file/run cannot be made, because",
    "--run-dir done": "done holds a finished run (it has a result.json)",
    "--array x": "--array has 'x': expected key=value,value",
    "--array seed=1": "--array is 'seed=1', which is a single run",
    "--array seed=1,1": "--array has 'seed=1,1': expected key=value,value, each key and value once",
    "--array seed=1,2;seed=3,4": "--array has 'seed=3,4': expected key=value,value, each key and value once",
    "--array optim.lr=0.1,fast": "optim.lr is fast (command line): expected a number (task 1 of --array)",
    "--array train.global_batch_size=64,63 --processes-per-node 2": "is 63, which 2 processes cannot divide",
    "--array seed=1,2 seed=3": "seed is given by --array and by seed=...: remove one of them",
    "--sbatch-option=x": "'x' is no option of a scheduler: it must be one line that begins with -",
    "--sbatch-option='--comment=a\nrm -r x'": "it must be one line that begins with -",
    "-- --lr 0.1": "--lr: unknown option; recipe values are given as key=value: optim.lr=0.1",
    "-- --trackers wandbb": "--trackers has 'wandbb': unknown tracker; did you mean wandb",
    "-- --resume nowhere": "--resume is nowhere: no such folder",
    "-- --recipe mnist": "--recipe is given twice (digits and mnist): keep one of them",
    "-- optim.lrr=1": "optim.lrr (command line): there is no such key",
}


@pytest.mark.parametrize(("words", "sentence"), PROBLEMS.items(), ids=PROBLEMS)
def test_what_would_fail_in_the_job(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    put(tmp_path, "done/result.json", "{}")
    job = ["--scheduler", "slurm", "--nodes", "1", "--time", "1:00:00", *shlex.split(words)]
    refused(["samerun", "submit", "--dry-run", *job], sentence, 10)
    assert not (tmp_path / "runs").exists()


OPTIONS: dict[str, str] = {
    "--time 1:00:00": "the following arguments are required: --nodes",
    "--nodes two": "--nodes: 'two': expected a whole number, 1 or more",
    "--time 1h": "--time: '1h': expected hours:minutes:seconds",
    "--time 1:60:00": "--time: '1:60:00': expected hours:minutes:seconds",
    "--time 0:00:00": "--time: '0:00:00': expected hours:minutes:seconds, more than 0",
    "--gpus-per-node a100:": "--gpus-per-node: 'a100:': expected a whole number, 1 or more, such as 4 (for Slurm also a100:4)",
    "--gpus-per-node a100:2,h100:0": "--gpus-per-node: 'a100:2,h100:0': expected a whole number, 1 or more",
    "--job-name a;b": "--job-name: 'a;b': expected a word of letters",
    "--partition 'gpu\n#SBATCH --nodes=9'": r"--partition: 'gpu\n#SBATCH --nodes=9': expected a word of letters",
    "--gpus-per-node 2 --processes-per-node 2": "--processes-per-node: not allowed with argument --gpus-per-node",
}


@pytest.mark.parametrize(("words", "sentence"), OPTIONS.items(), ids=OPTIONS)
def test_an_option_of_the_wrong_form(words: str, sentence: str, refused: Refused) -> None:
    job = [] if words == "--time 1:00:00" else ["--nodes", "1"]
    job += [] if "--time" in words else ["--time", "1:00:00"]
    refused(["samerun", "submit", "--dry-run", *(job if "--nodes" not in words else job[2:]), *shlex.split(words)], sentence, 2)
