"""Jobs and sweeps that cannot be submitted: all that is wrong is said before the queue."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from refusals import Refused, put

OPTIONS: dict[str, str] = {
    "": "--nodes is not given: give the number of nodes of the job",
    "--nodes 1": "--time is not given: give the time limit of the job",
    "--nodes 0 --time 1:00:00": "--nodes is '0': it must be a whole number, at least 1",
    "--nodes two --time 1:00:00": "--nodes is 'two': it must be a whole number, at least 1",
    "--nodes 1 --time 1h": "--time is '1h': it must be hours:minutes:seconds",
    "--nodes 1 --time 0:00:00": "--time is '0:00:00': it must be hours:minutes:seconds, more than 0",
    "JOB --gpus-per-node a100:": "--gpus-per-node is 'a100:': it must be a whole number, at least 1",
    "JOB --gpus-per-node a100:2,h100:0": "--gpus-per-node is 'a100:2,h100:0': it must be a whole number, at least 1",
    "JOB --gpus-per-node 3": "train.global_batch_size is 64, which 3 processes cannot divide",
    "--nodes 1 --time 1:60:00": "--time is '1:60:00': it must be hours:minutes:seconds",
    "--nodes 3 --time 1:00:00 --preset cpu": "preset cpu starts 1 process, and this run has 3",
    "JOB --processes-per-node 1.5": "--processes-per-node is '1.5': it must be a whole number, at least 1",
    "JOB --num_processes 3 --gpus-per-node 2": "--num_processes is 3, the total number of processes",
    "JOB --cpus-per-node all": "--cpus-per-node is 'all': it must be a whole number, at least 1",
    "JOB --max-requeues -1": "--max-requeues is '-1': it must be a whole number, at least 0",
    "JOB --job-name a;b": "--job-name is 'a;b': it must be a word of letters",
    "JOB --partition 'gpu\n#SBATCH --nodes=9'": r"--partition is 'gpu\n#SBATCH --nodes=9': it must be a word of letters",
    "JOB --preset ddp": "did you mean multi_gpu?",
    "JOB --preset cpu --processes-per-node 2": "preset cpu starts 1 process, and this run has 2",
    "JOB --recipe digts": "there is no recipe and no file of that name; did you mean digits?",
    "JOB optim.lrr=1": "optim.lrr (command line): there is no such key; did you mean optim.lr?",
    "JOB seed=1 seed=2": "seed is given twice (command line: 1 and 2): keep one of them",
    "JOB model.name=resnet-18": "model.name is 'resnet-18': no such model; did you mean resnet18",
    "JOB data.path=nowhere": "you may not read it. Correct it, or give --data-on-nodes if only the nodes of the job have it",
    "JOB --recipe imagefolder": "data.path is not given, and the recipe has no data without it",
    "JOB --run-dir file": "file is a file: choose another --run-dir",
    "JOB --run-dir file/run": "file/run cannot be made, because",
    "JOB --run-dir done": "done holds a finished run (it has a result.json)",
    "JOB --array x": "--array has 'x': expected key=value,value",
    "JOB --array seed=1": "--array is 'seed=1', which is a single run",
    "JOB --array seed=1,1": "--array has 'seed=1,1': a value is given twice",
    "JOB --array seed=1,2;seed=3,4": "--array has seed twice: give all its values in one list",
    "JOB --array seed=1,,2": "--array has 'seed=1,,2': expected key=value,value",
    "JOB --array optim.lrr=1,2": "optim.lrr (command line): there is no such key",
    "JOB --array optim.lr=0.1,fast": "optim.lr is fast (command line): expected a number (task 1 of --array)",
    "JOB --array train.global_batch_size=64,63 --processes-per-node 2": "is 63, which 2 processes cannot divide",
    "JOB --array seed=1,2 seed=3": "seed is given by --array and by seed=...: remove one of them",
    "JOB --sbatch-option=--nodes=3": "--sbatch-option is '--nodes=3': use --nodes instead",
    "JOB --sbatch-option='-t 5'": "--sbatch-option is '-t 5': use --time instead",
    "JOB --sbatch-option=x": "--sbatch-option is 'x': it must be one line that begins with -",
    "JOB --sbatch-option='--comment=a\nrm -r x'": "it must be one line that begins with -",
    "JOB --qsub-option=-x": "'-x' is an option of another scheduler, but the job is submitted with sbatch",
    "JOB --scheduler pbs --gpus-per-node a100:2": "--gpus-per-node is 'a100:2': for PBS it must be a number",
    "JOB -- --lr 0.1": "--lr: unknown option; recipe values are given as key=value: optim.lr=0.1",
    "JOB -- --trackers wandbb": "--trackers has 'wandbb': unknown tracker; did you mean wandb",
    "JOB -- --resume nowhere": "--resume is nowhere: no such folder",
    "JOB -- --init-from nowhere": "recipe values are given as key=value: train.init_from=nowhere",
    "JOB train.init_from=nowhere": "train.init_from is 'nowhere': no such file or folder",
    "JOB -- --recipe mnist": "--recipe is given after --: give it before --, where it is checked",
    "JOB -- --hang-timeout soon": "--hang-timeout: 'soon': expected a whole number, 0 or more",
    "JOB -- optim.lrr=1": "optim.lrr (command line): there is no such key",
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), OPTIONS.items(), ids=OPTIONS)
def test_options(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    put(tmp_path, "done/result.json", "{}")
    job = shlex.split(words.replace("JOB", "--nodes 1 --time 1:00:00"))
    scheduler = [] if "--scheduler" in job else ["--scheduler", "slurm"]
    refused(["samerun", "submit", "--dry-run", *scheduler, *job], sentence, 10)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--lr 0.1", "--lr: unknown option; recipe values are given as key=value: optim.lr=0.1"),
        ("--scheduler lsf", "--scheduler: invalid choice: 'lsf'"),
        ("--partition=", "--partition is empty: give it a value or leave it out"),
        ("--nodes", "--nodes: expected one argument"),
        ("--gpus-per-node 2 --processes-per-node 2", "--processes-per-node: not allowed with argument --gpus-per-node"),
    ],
)
def test_words(words: str, sentence: str, refused: Refused) -> None:
    refused(["samerun", "submit", "--dry-run", *words.split()], sentence, 2)
