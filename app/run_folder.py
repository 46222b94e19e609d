"""The run folder: all that a run leaves behind, written by one process.

    recipe.yaml       the resolved recipe; `--recipe RUN/recipe.yaml` repeats the run
    preset.yaml       the preset it ran under, where the launcher's command line names one
    run.json          processes, hosts and devices, batch plan, versions, commit, command
    metrics.jsonl     one line per logged step
    evaluations.jsonl one line per evaluation on the test set
    samples.jsonl     with log.samples: the samples of each step
    ledger.jsonl      over all starts: what was fed in each step, and where the time went (app/ledger.py)
    checkpoints/      what the run can go on from (app/checkpoints/step_folders.py)
    result.json       at the end: steps, samples, test scores, throughput
    test_predictions/ at the end: which classes were taken for which, and some test pictures (app/predictions.py)
    model.safetensors, model.json   at the end: the weights, and what rebuilds the model around them
    outcome.json      at the end: finished or stopped, why, and whether the run is to be started again
    incarnation.json  which start of the run the folder belongs to
    profile/          with profile.steps: a trace of each rank, all on one time axis, and a summary (app/profiling/)
    stacks/           after a hang: where each rank stood
    trackers.json     the run's names in its trackers
    tensorboard/, ... what trackers write
    STOP, SAVE        made by the user, who wants the run to stop or to save

Files appear whole or not at all: each is written beside its name and renamed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.errors import RunFolderError

RECIPE, PRESET, RUN, RESULT = "recipe.yaml", "preset.yaml", "run.json", "result.json"
METRICS, EVALUATIONS, SAMPLES, LEDGER = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"
PREDICTIONS, PREDICTIONS_TOLD = "test_predictions", "predictions.json"
MODEL, MODEL_CONFIG = "model.safetensors", "model.json"
OUTCOME, INCARNATION, STACKS, STOP, SAVE = "outcome.json", "incarnation.json", "stacks", "STOP", "SAVE"
TRACKERS, TENSORBOARD, PROFILE = "trackers.json", "tensorboard", "profile"


@dataclass(frozen=True)
class Preset:
    """The preset file this process was launched with."""

    name: str
    """File name without its ending."""
    text: str


def create(run_dir: str | None, recipe_name: str, *, resumed_step: int | None = None) -> Path:
    """Make the run folder and return its path: `run_dir`, or `runs/<recipe>-<time>`.

    With `resumed_step` it may hold a run already, of which it then forgets what came after that step. Raises RunFolderError
    if it holds a run otherwise, or cannot be written.
    """
    path = Path(run_dir) if run_dir else _unused(Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (path / RECIPE).exists() and resumed_step is None:
        raise RunFolderError(
            f"{path} holds a run already (it has a {RECIPE}): choose another --run-dir, go on with it by --resume auto, or "
            "delete the folder."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / OUTCOME).unlink(missing_ok=True)
        for name in (METRICS, EVALUATIONS, SAMPLES):
            if (path / name).exists():
                write_text(path / name, _upto(path / name, resumed_step or 0))
        if not (path / METRICS).exists():
            write_text(path / METRICS, "")
    except OSError as error:
        raise RunFolderError(f"the run folder {path} cannot be written: {error.strerror}. Choose another --run-dir.") from error
    return path


def claim(path: Path, incarnation: str) -> None:
    """Make the folder belong to this start of the run, whose name is `incarnation`, and to no earlier one."""
    write_json(path / INCARNATION, {"incarnation": incarnation, "host": socket.gethostname(), "time": time.time()})


def check_claim(path: Path, incarnation: str) -> None:
    """Raise RunFolderError if a later start of the run has claimed the folder; comes before what that could lose by.

    After a cut link the processes of a job may live on while the scheduler has started it again elsewhere.
    """
    claimed = read_json(path / INCARNATION)
    if claimed["incarnation"] != incarnation:
        raise RunFolderError(
            f"another start of this run, on {claimed['host']}, has taken {path} over: this one ends and writes nothing more. "
            "If you started both, give one another --run-dir."
        )


def check_may_begin_again(path: Path) -> None:
    """Say that a run which ended before its first checkpoint begins again; raise RunFolderError if it was finished."""
    if (path / RESULT).exists():
        raise RunFolderError(
            f"{path} holds a finished run without a checkpoint, so there is nothing to go on from: choose another "
            "--run-dir, or delete the folder."
        )
    if (path / RECIPE).exists():
        print(f"{path} has no checkpoint yet: the run begins again", flush=True)  # noqa: T201 - the user must know


def last_steps(path: Path) -> dict[str, int]:
    """Return the last step of metrics.jsonl and of evaluations.jsonl, by their names; of neither that has no line.

    Raises RunFolderError if one cannot be read.
    """
    try:
        lines = {name: _whole_lines(path / name) for name in (METRICS, EVALUATIONS) if (path / name).exists()}
    except OSError as error:
        raise RunFolderError(f"the run folder {path} cannot be read: {error.strerror}. Choose another --run-dir.") from error
    return {name: json.loads(of_file[-1])["step"] for name, of_file in lines.items() if of_file}


def _upto(file: Path, step: int) -> str:
    """The lines of the first so many steps."""
    return "".join(line for line in _whole_lines(file) if json.loads(line)["step"] <= step)


def _whole_lines(file: Path) -> list[str]:
    """The lines of a file; the last line of a run that was killed may be half of one, and is left out."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def write_text(path: Path, text: str) -> None:
    """Write the file so that it is never seen half-written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as an indented JSON file, whole or not at all."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object. Raises RunFolderError if it is missing or broken."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {path.parent} is not the folder of a finished run.") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} is broken: it holds {type(values).__name__}, not an object.")
    return values


def launched_preset() -> Preset | None:
    """Return the preset that `accelerate launch` read for this process, or None if it was started otherwise.

    Accelerate hands on what the preset says, but not its name: the command line of the parent process has it.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
        directory = parent.cwd() if parent else ""
    except psutil.Error:  # the parent is gone, or belongs to somebody else: then its name is not known
        return None
    for position, word in enumerate(command):
        if word == "--config_file" and position + 1 < len(command):
            path = Path(directory, command[position + 1])
        elif word.startswith("--config_file="):
            path = Path(directory, word.partition("=")[2])
        else:
            continue
        return Preset(path.stem, path.read_text()) if path.is_file() else None
    return None


def source_commit() -> str | None:
    """Return the git commit of this program's checkout, with `+changes` if files differ from it; None outside git."""
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit or None
