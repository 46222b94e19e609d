"""The run folder: everything that a run writes, by one process.

    recipe.yaml       the resolved recipe; `--recipe RUN/recipe.yaml` repeats the run
    preset.yaml       the preset it ran under, where the launcher's command line names one
    run.json          processes, hosts and devices, batch plan, versions, commit, command
    metrics.jsonl     one line per logged step
    evaluations.jsonl one line per evaluation: of the validation split on the way, of the test split at the end
    texts.jsonl       what the task shows after evaluations on the way: texts that the model wrote, each with its title
    samples.jsonl     with log.samples: the samples of each step
    ledger.jsonl      over all starts: what was fed in each step, and where the time went (app/runs/ledger.py)
    checkpoints/      what the run can go on from (app/checkpoints/step_folders.py)
    frozen/           the parameters that are not trained, once for all checkpoints, which name them by their digest
    result.json       at the end: steps, samples, scores, throughput
    test_predictions/ at the end: what the task leaves of its predictions on the test split; validation_predictions/
                      where there is none
    model.safetensors, model.json   at the end: the weights, and what rebuilds the model around them
    config.json, ...  at the end of a language model's run: what makes the folder one that transformers loads
    outcome.json      at the end: finished or stopped, why, and whether the run is to be started again
    errors/           of each start that failed: why (app/runs/failure.py)
    starts/           which start of the run the folder belongs to, and what that is writing (app/runs/claim.py)
    profile/          with profile.steps: a trace of each rank, and how far its clock is ahead (app/metrics/profile.py)
    stacks/           after a hang: where each rank stood
    trackers.json     the run's names in its trackers
    tensorboard/, ... what trackers write
    STOP, SAVE        made by the user, who wants the run to stop or to save

Files appear whole or not at all. A run writes them by its claim; here is what they are called, and how they are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.files.atomic_files import disk_errors, file_made_whole
from app.files.lines import Lines, is_count, parsed
from app.files.paths import new_folder

RECIPE, PRESET, RUN, RESULT = "recipe.yaml", "preset.yaml", "run.json", "result.json"
METRICS, EVALUATIONS, SAMPLES, LEDGER = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "ledger.jsonl"
TEXTS = "texts.jsonl"
PREDICTIONS_TOLD = "predictions.json"
MODEL, MODEL_CONFIG, MODEL_INDEX = "model.safetensors", "model.json", "model.safetensors.index.json"
PROGRAMS = {"torch": "model.pt2", "onnx": "model.onnx"}
"""Beside exported weights: the model as a program, by its kind."""
OUTCOME, STARTS, STACKS, STOP, SAVE = "outcome.json", "starts", "stacks", "STOP", "SAVE"
TRACKERS, TENSORBOARD, PROFILE = "trackers.json", "tensorboard", "profile"


def predictions(split: str) -> str:
    """Return the folder of the predictions on a split."""
    return f"{split}_predictions"


def monitor(about: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the score by which a run is judged, as its run.json (`about`) tells, and whether the best is its `max` or `min`.

    None if it does not tell.
    """
    match about.get("monitor"):
        case [str(name), ("max" | "min") as best]:
            return name, best
    return None


UNIT = "samples"
"""What a run counts whose task has no unit of its own."""


def unit(about: Mapping[str, Any]) -> str:
    """Return what the loss of a run is the mean of, as its run.json (`about`) tells: samples, tokens, ..."""
    found = about.get("unit")
    return found if isinstance(found, str) else UNIT


def choose(run_dir: str | None, recipe_name: str, *, may_exist: bool) -> Path:
    """Return the run folder, which is then there: `run_dir`, or a new one `runs/<recipe>-<time>`.

    Raises RunFolderError if it cannot be made, or holds a run and must not (`may_exist`).
    """
    path = Path(run_dir) if run_dir else Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if run_dir and not may_exist and (path / RECIPE).exists():
            raise RunFolderError(
                f"{path} holds a run already (it has a {RECIPE}): choose another --run-dir, resume it with --resume auto, or "
                "delete the folder."
            )
        if run_dir:
            path.mkdir(parents=True, exist_ok=True)
            return path
        return new_folder(path)
    except OSError as error:
        raise RunFolderError(
            f"the run folder {path} cannot be written: {error.strerror or error}. Choose another --run-dir."
        ) from error


def refuse_links(path: Path) -> None:
    """Raise RunFolderError for a symbolic link in a run folder: what a run writes and removes would be outside it."""
    for folder in (path, path / STARTS):
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.is_symlink():
                raise RunFolderError(
                    f"{entry} is a symbolic link, and a run writes and removes only files within its run folder: replace it "
                    "by what it leads to. The run folder itself may be a link."
                )


def check_may_begin_again(path: Path) -> None:
    """Say that a run which ended before its first checkpoint begins again; raise RunFolderError if it was finished."""
    refuse_finished(path)
    if (path / RECIPE).exists():
        print(f"{path} has no checkpoint yet: the run starts from step 1", flush=True)  # noqa: T201 - the user must know


def refuse_finished(path: Path) -> None:
    """Raise RunFolderError for a folder, without a checkpoint, of a run that was finished."""
    if (path / RESULT).exists():
        raise RunFolderError(
            f"{path} holds a finished run without a checkpoint, so there is nothing to resume from: choose another "
            "--run-dir, or delete the folder."
        )


def last_steps(path: Path) -> dict[str, int]:
    """Return the last step of metrics.jsonl and of evaluations.jsonl, by their names; of neither that has no line.

    Raises RunFolderError if one cannot be read.
    """
    steps = {
        name: max((values["step"] for *_, values in Lines(path / name) if is_count(values.get("step"))), default=None)
        for name in (METRICS, EVALUATIONS)
        if (path / name).exists()
    }
    return {name: last for name, last in steps.items() if last is not None}


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is never seen half-written, as tools do beside a run. Raises RunFolderError."""
    with disk_errors(path, "written", RunFolderError), file_made_whole(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as an indented JSON file, whole or not at all. Raises RunFolderError."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object. Raises RunFolderError if it is missing or broken."""
    try:
        values = parsed(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: {path.parent} is not the folder of a finished run.") from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} is broken: it holds {type(values).__name__}, not an object.")
    return values
