"""What every other command is given and cannot use: folders, files, numbers and names."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import Refused, put

NO_FOLDER = "{} is not a folder: give that of a run"
NO_RUN = "{} is not the folder of a run"
LEDGER = "{}/ledger.jsonl is missing: {} is not the folder of a run that took a step"
# For each command: what it says of a path that is not there or a file, and of an empty folder.
OF_RUNS: dict[str, tuple[str, str, int]] = {
    "report {}": (NO_FOLDER, NO_RUN, 7),
    "curves {}": (NO_FOLDER, NO_RUN, 7),
    "compare {0} {0}": (NO_FOLDER, NO_RUN, 7),
    "watch --once {}": (NO_FOLDER, NO_RUN, 7),
    "timeline {}": ("{} has no profile", "{} has no profile", 7),
    "verify {}": (LEDGER, LEDGER, 7),
    "export {}": (
        "{} is not a checkpoint and contains no complete checkpoint",
        "{} is not a checkpoint and contains no complete checkpoint",
        11,
    ),
}


@pytest.mark.parametrize("place", ["nowhere", "file", "folder"])
@pytest.mark.parametrize(("command", "expected"), OF_RUNS.items(), ids=OF_RUNS)
def test_what_is_no_run(command: str, expected: tuple[str, str, int], place: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "text")
    put(tmp_path, "folder", None)
    of_file, of_folder, code = expected
    if place == "nowhere" and command.split()[0] in ("report", "timeline", "verify", "export"):
        of_file, code = "nowhere: there is no such run; did you mean nowhere-else?", 7
        put(tmp_path, "nowhere-else/run.json", "{}")
    sentence = (of_folder if place == "folder" else of_file).replace("{}", place)
    refused(["samerun", *command.format(place).split()], sentence, code)


@pytest.mark.parametrize("command", ["report .", "runs", "generate .", "parity", "scale", "doctor", "data check x"])
def test_options_that_there_are_not(command: str, refused: Refused) -> None:
    refused(["samerun", *command.split(), "--nonsense"], "--nonsense: unknown option", 2)


WORDS: dict[str, tuple[str, int]] = {
    "lauch": ("lauch: unknown command; did you mean launch", 2),
    "-v": ("samerun 0.", 0),
    "launch -h1": ("-h/--help: it takes no value, but is given '1' (`samerun launch --help` lists the options)", 2),
    "presets zero": ("did you mean deepspeed_zero1 or deepspeed_zero2 or deepspeed_zero3? `samerun presets` lists all", 2),
    "plan --device v100-32 --mixed-precision bf16 --devices 1": ("v100-32 has no bf16 arithmetic, and emulates it slowly;", 0),
    "doctor --processes 0": ("processes_per_node is 0 (--processes): it must be at least 1", 5),
    "parity train.steps=3": ("train.steps=3 (command line): the comparison sets this; use --steps", 3),
    "parity seed=1 seed=2": ("seed is given twice (command line: 1 and 2)", 3),
    "parity --out folder": ("--out folder exists: choose a new folder", 2),
    "parity --processes 7": ("there is no case to compare with the reference", 3),
    "scale --devices 7": ("no case can run:\ntrain.global_batch_size is 64, which 7 processes cannot split", 2),
    "scale --nodes 2": ("--nodes is 2, but there is no scheduler's allocation here", 2),
    "parity --keep folder": ("--keep: unknown option; it is now --out", 2),
    "scale --processes 2": ("--processes: unknown option; give --devices, the number of all devices", 2),
    "data check digits --processes 2": ("--processes: unknown option; it is now --workers", 2),
    "--verison": ("as in `samerun launch --recipe digits`; did you mean --version?", 2),
    "--recipe digits": ("--recipe: expected a command first, as in `samerun launch", 2),
    "script multinode": ("script: unknown command; did you mean scripts?", 2),
    "launch --resume train.epochs=3": ("--resume is train.epochs=3: no such folder; give auto, never, or the path of", 11),
    "resume fold": ("fold: there is no such run", 7),
    "resume folder": ("folder/run.json is missing", 7),
    "resume --processes 2 folder": ("RUN", 2),
    "stop folder": ("folder/run.json is missing", 7),
    "watch": ("there is no run in runs/", 7),
    "curves": ("there is no run in runs/", 7),
    "report --out page.html": ("there is no run in runs/", 7),
    "recipes digit": ("digit: unknown recipe; did you mean digits?", 2),
    "recipes --keys lrr": ("--keys lrr: no key has this in its name or meaning", 2),
    "parity --tolerance nan": ("'nan': expected", 2),
    "parity --processes 1,,2": ("'1,,2': expected", 2),
    "plan --device a100": ("a100-80 or a100-40", 2),
    "scale --out file": ("file/multi_gpu-1x1-1 cannot be made, because ", 2),
}


@pytest.mark.parametrize(("words", "expected"), WORDS.items(), ids=WORDS)
def test_words(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "text")
    put(tmp_path, "folder", None)
    refused(["samerun", *words.split()], *expected)


PROGRAMS: dict[str, tuple[str, int]] = {
    "samerun report old --uot page.html": ("--uot: unknown option; did you mean --out?", 2),
    "samerun runs folder": ("there are no runs in", 7),
    "samerun launch --lr 0.1": ("--lr: unknown option; recipe values are given as key=value: optim.lr=...", 2),
    "samerun launch digits": ("'digits': expected an option or key=value; give --recipe digits", 2),
    "samerun plan lm_tinny": ("'lm_tinny': expected an option or key=value; did you mean --recipe lm_tiny?", 2),
    "samerun sweep my.yaml seed=1,2": ("'my.yaml': expected an option or key=value; give --recipe my.yaml", 2),
    "samerun launch fsdp.yaml": ("'fsdp.yaml': expected an option or key=value; give --preset fsdp.yaml", 2),
    "samerun launch help": ("'help': expected an option or key=value; `samerun COMMAND --help` lists the options", 2),
    "samerun launch old": ("'old': expected an option or key=value; `samerun resume old` continues this run", 2),
    "samerun launch --push-to-hub": ("after the training, `samerun export` can upload the weights", 2),
    "samerun launch --compile": ("set dynamo_backend: INDUCTOR in a copy of the preset", 2),
    "samerun launch --gres gpu:2": ("--gres: unknown option; it is for a job: `samerun submit --help`", 2),
    "samerun submit --nodes 1 --time 1:00:00 --gres gpu:2": ("--gres: unknown option; give --gpus-per-node", 2),
    "samerun submit --nodes 1 --time 1:00:00 --queue x": ("--queue: unknown option; give --partition", 2),
    "samerun submit --nodes 1 --time 1:00:00 --mail-user x": ("give --sbatch-option=--NAME=VALUE (Slurm)", 2),
    "samerun launch optim.lr = 0.1": ("'optim.lr': expected an option or key=value; give optim.lr=...", 2),
    "app.train task.py": ("write `task: task.py` into a recipe.yaml and give --recipe recipe.yaml; `samerun new DIR`", 2),
    "samerun evaluate run digits": ("run: there is no such run", 7),
    "samerun launch --recipe lm_tiny --model x": ("key=value: model.architecture=... for random weights, or model.path=", 2),
    "samerun launch --per_device_train_batch_size 8": ("key=value: train.global_batch_size=..., over all processes", 2),
    "app.train --bf16": ("--bf16: unknown option; `samerun launch` has --mixed-precision bf16", 2),
    "samerun submit --nodes 1 --time 1:00:00 --fp16": ("--fp16: unknown option; give -- --mixed-precision fp16", 2),
    "samerun submit --nodes 1 --time 1:00:00 --resume x": ("--resume: unknown option; give -- --resume", 2),
    "samerun plan --nodes 2": ("--nodes: unknown option; give --devices, the number of all devices", 2),
    "samerun launch --project x": ("recipe values are given as key=value; `samerun launch --help` lists the options", 2),
    "samerun launch --tf32": ("recipe values are given as key=value: train.tf32=true", 2),
    "samerun launch --trackers none --trackers aim": ("--trackers: given twice (none and aim); give --trackers none,aim", 2),
    "samerun launch --config_file cpu --preset hsdp": ("--preset: given twice (cpu and hsdp); keep one of them", 2),
    "samerun sweep optim.lr=1e-3 3e-3": ("no key has several values in 'optim.lr=1e-3 3e-3': separate values by commas", 2),
    "samerun presets fsdp": ("fsdp: unknown preset; did you mean fsdp2", 2),
    "samerun launch --tracker none": ("--tracker: unknown option; did you mean --trackers?", 2),
    "samerun verify old y": ("y: one argument too many", 2),
    "samerun evaluate old data.path=y train.steps=3": ("train.steps: it has no effect here", 2),
}


@pytest.mark.parametrize(("words", "expected"), PROGRAMS.items(), ids=PROGRAMS)
def test_programs(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "folder", None)
    put(tmp_path, "old/run.json", "{}")
    put(tmp_path, "fsdp.yaml", "distributed_type: FSDP\n")
    refused(words.split(), *expected)


DATA: dict[str, tuple[str, int]] = {
    "inspect nowhere": ("nowhere is neither a recipe", 3),
    "inspect file": ("data.path=file is a file of an unknown kind", 6),
    "inspect folder": ("folder contains no data of a known kind; give data.source=KIND", 6),
    "inspect pictures": ("a/1.png", 6),
    "inspect pictures data.test_split=test": ("pictures/test cannot be read (No such file or directory)", 6),
    "pack digits --to arrays --out file": ("file already exists, and no files are replaced", 6),
}


@pytest.mark.parametrize(("words", "expected"), DATA.items(), ids=DATA)
def test_data(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "text")
    put(tmp_path, "folder", None)
    put(tmp_path, "pictures/train/a/1.png", b"\x89PNG\r\n\x1a\nbroken")
    put(tmp_path, "pictures/train/b/1.png", b"\x89PNG\r\n\x1a\nbroken")
    refused(["samerun", "data", *words.split()], *expected)
